#!lua flags=allow-oom
-- Ends an evaluation round and forgets what it left.
-- KEYS  1 eval  2 rounds  3 answers
-- ARGV  1 consumer group  2 version of the round  3 packed result, '' where it is incomplete
-- Returns 1: ended. 0: it is not the open round.
if redis.call('HGET', KEYS[2], 'round') ~= ARGV[2] then return 0 end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  redis.call('XACK', KEYS[1], ARGV[1], entry[1])
  redis.call('XDEL', KEYS[1], entry[1])
end
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[2], 'round', 'prompts', 'started')
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], 'result', ARGV[3]) end
return 1

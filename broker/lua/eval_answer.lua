#!lua flags=allow-oom
-- Records the answers to an evaluation prompt; the first ones count, whoever brings them. The last ones of a round are an
-- event.
-- KEYS  1 eval  2 rounds  3 answers  4 events
-- ARGV  1 consumer group  2 entry id  3 version of the round  4 index  5 packed answers
-- Returns 1: these are the answers that count. 0: others are, or the round is over.
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
local state = redis.call('HMGET', KEYS[2], 'round', 'prompts')
if state[1] ~= ARGV[3] then return 0 end
if redis.call('HSETNX', KEYS[3], ARGV[4], ARGV[5]) == 1 and redis.call('HLEN', KEYS[3]) == tonumber(state[2]) then
  redis.call('XADD', KEYS[4], 'MAXLEN', 100, '*', 'e', 'evaluated')
end
return redis.call('HGET', KEYS[3], ARGV[4]) == ARGV[5] and 1 or 0

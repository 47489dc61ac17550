#!lua flags=allow-oom
-- Records that groups were trained by the optimizer steps that made a version. They stay in the stream until a durable
-- checkpoint contains them, and no longer count as outstanding.
-- KEYS  1 ledger  2 state  3 arrived  4 unsettled  5 events
-- ARGV  1 epoch  2 version, then entry id and group id of each
-- Returns how many were newly recorded. An error FENCED where the epoch is over.
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED learner epoch ' .. ARGV[1]) end
local n = 0
for i = 3, #ARGV, 2 do
  if redis.call('HGET', KEYS[3], ARGV[i + 1]) == ARGV[i] then
    n = n + redis.call('HSETNX', KEYS[4], ARGV[i + 1], ARGV[i])
  end
end
redis.call('HINCRBY', KEYS[1], 'trained', n)
redis.call('HSET', KEYS[2], 'version', ARGV[2])
redis.call('XADD', KEYS[5], 'MAXLEN', 100, '*', 'e', 'step')
return n

#!lua flags=allow-oom
-- Records that groups were trained by the optimizer steps that made a version. They stay in the stream until a durable
-- checkpoint contains them, and no longer count as outstanding.
-- KEYS  1 ledger  2 state  3 arrived  4 unsettled  5 events  6 outstanding
-- ARGV  1 epoch  2 version, then entry id and group id of each
-- Returns how many were newly recorded. An error FENCED where the epoch is over.
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED learner epoch ' .. ARGV[1]) end
local n = 0
for i = 3, #ARGV, 2 do
  local group_id = ARGV[i + 1]
  if redis.call('HGET', KEYS[3], group_id) == ARGV[i] and not redis.call('ZSCORE', KEYS[4], group_id) then
    redis.call('ZADD', KEYS[4], redis.call('ZSCORE', KEYS[6], group_id) or '0', group_id)
    redis.call('ZREM', KEYS[6], group_id)
    n = n + 1
  end
end
redis.call('HINCRBY', KEYS[1], 'trained', n)
redis.call('HSET', KEYS[2], 'version', ARGV[2])
redis.call('XADD', KEYS[5], 'MAXLEN', 100, '*', 'e', 'step')
return n

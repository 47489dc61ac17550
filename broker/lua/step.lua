#!lua flags=allow-oom
-- Records that groups were trained by the optimizer steps that made a version. They stay in the stream until a durable
-- checkpoint contains them, and no longer count as outstanding.
-- KEYS  1 ledger  2 state  3 arrived  4 unsettled  5 events  6 outstanding
-- ARGV  1 epoch  2 version, then entry id and group id of each
-- Returns how many were newly recorded. An error FENCED where the epoch is over; an error LOST, and nothing written,
-- where the server has lost writes that the learner knows of: an earlier step, or these groups, or their delivery.
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED learner epoch ' .. ARGV[1]) end
local known, again = 0, 0
for i = 3, #ARGV, 2 do
  if redis.call('HGET', KEYS[3], ARGV[i + 1]) == ARGV[i] then known = known + 1 end
  if redis.call('ZSCORE', KEYS[4], ARGV[i + 1]) then again = again + 1 end
end
local groups, version = (#ARGV - 2) / 2, redis.call('HGET', KEYS[2], 'version')
if known == groups and again == groups and version == ARGV[2] then return 0 end  -- sent twice
if known < groups or again > 0 or tonumber(version or '0') + 1 ~= tonumber(ARGV[2]) then
  return redis.error_reply('LOST writes of learner epoch ' .. ARGV[1] .. ' before version ' .. ARGV[2])
end
for i = 3, #ARGV, 2 do
  redis.call('ZADD', KEYS[4], redis.call('ZSCORE', KEYS[6], ARGV[i + 1]) or '0', ARGV[i + 1])
  redis.call('ZREM', KEYS[6], ARGV[i + 1])
end
redis.call('HINCRBY', KEYS[1], 'trained', groups)
redis.call('HSET', KEYS[2], 'version', ARGV[2])
redis.call('XADD', KEYS[5], 'MAXLEN', 100, '*', 'e', 'step')
return groups

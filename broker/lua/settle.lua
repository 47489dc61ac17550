#!lua flags=allow-oom
-- Acknowledges and deletes trained groups whose effect is durable, in one step.
-- KEYS  1 groups  2 ledger  3 state  4 arrived  5 unsettled  6 expiries
-- ARGV  1 consumer group  2 epoch, then group ids
-- Returns how many were settled now. An error FENCED where the epoch is over.
if redis.call('HGET', KEYS[3], 'epoch') ~= ARGV[2] then return redis.error_reply('FENCED learner epoch ' .. ARGV[2]) end
local n = 0
for i = 3, #ARGV do
  if redis.call('ZREM', KEYS[5], ARGV[i]) == 1 then
    local id = redis.call('HGET', KEYS[4], ARGV[i])
    redis.call('XACK', KEYS[1], ARGV[1], id)
    redis.call('XDEL', KEYS[1], id)
    redis.call('HDEL', KEYS[4], ARGV[i])
    redis.call('HDEL', KEYS[6], ARGV[i])
    n = n + 1
  end
end
if n > 0 then redis.call('HINCRBY', KEYS[2], 'settled', n) end
return n

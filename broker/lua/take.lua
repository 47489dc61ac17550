#!lua flags=allow-oom
-- Follows an XREADGROUP of the learner in the same transaction: if another learner began, what was read is put back, at
-- its place. The payloads themselves do not pass through Lua, which would cost more than all the rest of a take.
-- KEYS  1 groups  2 state
-- ARGV  1 consumer group  2 epoch
-- Returns 1. An error FENCED where the epoch is over.
if redis.call('HGET', KEYS[2], 'epoch') == ARGV[2] then return 1 end
local consumer = 'epoch-' .. ARGV[2]
-- `begin` made the consumer group anew, so all that this consumer holds is what it just read: the newest that anybody has.
local first = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, consumer)[1]
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer)
if first then
  local ms, seq = string.match(first[1], '^(%d+)-(%d+)$')
  local before = ms .. '-' .. string.format('%.0f', seq - 1)
  if seq == '0' then before = string.format('%.0f', ms - 1) .. '-18446744073709551615' end
  redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], before)
end
return redis.error_reply('FENCED learner epoch ' .. ARGV[2])

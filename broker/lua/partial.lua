#!lua
-- Keeps what a generator has sampled so far of the group it holds a lease on, in the place of what was kept before.
-- KEYS  1 prompts  2 partial
-- ARGV  1 consumer group  2 consumer  3 entry id  4 group id  5 packed partial group
-- Returns 1: kept. 0: the lease was taken over; nothing was written. An error where the group id is not the lease's.
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
local entry = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
local fields, group_id = entry and entry[2] or {}, nil
for i = 1, #fields, 2 do
  if fields[i] == 'g' then group_id = fields[i + 1] end
end
if group_id ~= ARGV[4] then
  return redis.error_reply('MISMATCH lease ' .. ARGV[3] .. ' is of group ' .. (group_id or '-') .. ', not of ' .. ARGV[4])
end
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
return 1

#!lua flags=allow-oom
-- Resets the idle time of leases.
-- KEYS  1 prompts
-- ARGV  1 consumer group  2 consumer, then entry ids
-- Returns the entry ids that the consumer still holds.
local held = {}
for i = 3, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    held[#held + 1] = ARGV[i]
  end
end
return held

#!lua flags=allow-oom
-- Writes a member's state, stamped with the server's clock: the members' own clocks are never compared.
-- KEYS  1 members
-- ARGV  1 member id  2 packed member
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)) .. ' ' .. ARGV[2])
return 1

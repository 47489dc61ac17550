#!lua flags=allow-oom
-- Writes a member's state, stamped with the server's clock: the members' own clocks are never compared.
-- KEYS  1 members  2 drains
-- ARGV  1 member id  2 packed member  3 its incarnation
-- Returns 1: this process was asked to leave. 0: it was not.
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)) .. ' ' .. ARGV[2])
return redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[3] and 1 or 0

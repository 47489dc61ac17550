#!lua flags=no-writes
-- A hash with the server's clock, of one instant.
-- KEYS  1 hash  2 another one
-- Returns {seconds, microseconds, the first as a flat list, length of the other}.
local time = redis.call('TIME')
return {tonumber(time[1]), tonumber(time[2]), redis.call('HGETALL', KEYS[1]), redis.call('HLEN', KEYS[2])}

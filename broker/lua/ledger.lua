#!lua flags=no-writes
-- The ledger and the lengths it is checked against, of one instant.
-- KEYS  1 prompts  2 groups  3 unsettled  4 ledger  5 arrived
-- Returns {length of prompts, groups, unsettled groups, counters as a flat list}. Groups are entries of the stream, less
-- foreign ones that wait to be dead-lettered: those no lease produced, and the equation does not know them.
local groups = math.min(redis.call('XLEN', KEYS[2]), redis.call('HLEN', KEYS[5]))
return {redis.call('XLEN', KEYS[1]), groups, redis.call('HLEN', KEYS[3]), redis.call('HGETALL', KEYS[4])}

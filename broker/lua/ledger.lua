#!lua flags=no-writes
-- The ledger and the lengths it is checked against, of one instant.
-- KEYS  1 prompts  2 groups  3 unsettled  4 ledger
-- Returns {length of prompts, length of groups, unsettled groups, counters as a flat list}.
return {redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2]), redis.call('ZCARD', KEYS[3]), redis.call('HGETALL', KEYS[4])}

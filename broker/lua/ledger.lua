#!lua flags=no-writes
-- The ledger and what it is checked against, of one instant.
-- KEYS  1 prompts  2 groups  3 unsettled  4 ledger  5 outstanding
-- Returns {outstanding, counters as a flat list}. Outstanding are the entries of the streams that are not trained, less
-- foreign ones that wait to be dead-lettered: no release produced those, and the equation does not know them.
local entries = redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[2]) - redis.call('ZCARD', KEYS[3])
return {math.min(entries, redis.call('ZCARD', KEYS[5])), redis.call('HGETALL', KEYS[4])}

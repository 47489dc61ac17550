#!lua flags=no-writes
-- What waits and what is held, of one instant. Lengths are exact: what is done is deleted.
-- KEYS  1 prompts  2 groups  3 unsettled  4 dead  5 state
-- ARGV  1 consumer group of prompts  2 consumer group of groups, less its epoch
-- Returns {length of prompts, leased, length of groups, held, unsettled groups, dead letters}.
local function pending(stream, group) return redis.call('XPENDING', stream, group)[1] end
local epoch = redis.call('HGET', KEYS[5], 'epoch')  -- none: no learner began yet
return {
  redis.call('XLEN', KEYS[1]), pending(KEYS[1], ARGV[1]),
  redis.call('XLEN', KEYS[2]), epoch and pending(KEYS[2], ARGV[2] .. '-' .. epoch) or 0,
  redis.call('ZCARD', KEYS[3]), redis.call('XLEN', KEYS[4]),
}

#!lua
-- Begins an evaluation round: all of its prompts, or none. One round at a time: while another is open, this one is
-- skipped, once and for all.
-- KEYS  1 eval  2 rounds
-- ARGV  1 version of the round, then the packed prompts in order
-- Returns 1: begun. 0: it was begun before and is over. -1: skipped.
local state = redis.call('HMGET', KEYS[2], 'round', 'last')
if state[1] == ARGV[1] then return 1 end
if state[1] then
  redis.call('HSET', KEYS[2], 'last', ARGV[1])
  return -1
end
if state[2] == ARGV[1] then return 0 end
for i = 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'r', ARGV[1], 'i', i - 2, 'p', ARGV[i]) end
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[2], 'round', ARGV[1], 'last', ARGV[1], 'prompts', #ARGV - 1, 'started', now)
return 1

#!lua
-- Releases prompts: all of them or none, and only from the position the caller read. What is outstanding is looked up
-- here: since the caller looked, another feeder may have released, or a new learner taken trained groups back.
-- KEYS  1 prompts  2 ledger  3 state  4 outstanding
-- ARGV  1 expected position  2 most outstanding groups afterwards ('' any), then group id, version of the release and
--       packed prompt of each
-- Returns 1: released. 0: another position (somebody released these already), or no budget; nothing was written.
if tonumber(redis.call('HGET', KEYS[3], 'position') or '0') ~= tonumber(ARGV[1]) then return 0 end
local n = (#ARGV - 2) / 3
if ARGV[2] ~= '' and redis.call('ZCARD', KEYS[4]) + n > tonumber(ARGV[2]) then return 0 end
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
for i = 3, #ARGV, 3 do
  redis.call('XADD', KEYS[1], '*', 'g', ARGV[i], 't', now, 'p', ARGV[i + 2])
  redis.call('ZADD', KEYS[4], ARGV[i + 1], ARGV[i])
end
redis.call('HINCRBY', KEYS[2], 'released', n)
redis.call('HINCRBY', KEYS[3], 'position', n)
return 1

#!lua
-- Releases prompts: all of them or none, and only from the position the caller read. What is outstanding is measured
-- here: since the caller looked, another feeder may have released, or a new learner taken trained groups back.
-- KEYS  1 prompts  2 ledger  3 state  4 groups  5 unsettled
-- ARGV  1 expected position  2 most outstanding groups afterwards ('' any), then group id and packed prompt of each
-- Returns 1: released. 0: another position (somebody released these already), or no budget; nothing was written.
if tonumber(redis.call('HGET', KEYS[3], 'position') or '0') ~= tonumber(ARGV[1]) then return 0 end
local n = (#ARGV - 2) / 2
local outstanding = redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[4]) - redis.call('HLEN', KEYS[5])
if ARGV[2] ~= '' and outstanding + n > tonumber(ARGV[2]) then return 0 end
for i = 3, #ARGV, 2 do
  redis.call('XADD', KEYS[1], '*', 'g', ARGV[i], 'p', ARGV[i + 1])
end
redis.call('HINCRBY', KEYS[2], 'released', n)
redis.call('HINCRBY', KEYS[3], 'position', n)
return 1

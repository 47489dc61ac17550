#!lua flags=allow-oom
-- Ends a dead letter: it goes back for sampling, or is forgotten. What went back is outstanding and not dead any more;
-- what is forgotten stays counted as dead.
-- KEYS  1 prompts  2 dead  3 ledger  4 closed  5 outstanding
-- ARGV  1 entry id of the dead letter  2 what becomes of it: retried | dropped
--       3 group id  4 version of the release  5 packed prompt (retried)
-- Returns 1: done, by this call or by an earlier copy of it. 0: there is no such dead letter.
local mark = 'dead ' .. ARGV[1] .. ' ' .. ARGV[2]
if redis.call('ZSCORE', KEYS[4], mark) then return 1 end
if redis.call('XDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('ZADD', KEYS[4], now, mark)
if ARGV[2] == 'retried' then
  redis.call('XADD', KEYS[1], '*', 'g', ARGV[3], 't', now, 'p', ARGV[5])
  redis.call('ZADD', KEYS[5], ARGV[4], ARGV[3])
  redis.call('HINCRBY', KEYS[3], 'dead', -1)
end
return 1

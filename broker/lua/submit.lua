#!lua
-- A generator hands in the group of a lease: it enters the stream of groups and the lease closes, in one step. Refused at
-- the memory limit, which producers wait with (`broker.link.GROWING`).
-- Every call from here costs 3 us and more, which is why what the lease brought comes back as arguments, and why no mark
-- of its end is kept (see close): `arrived` tells it, as long as the group is in the stream.
-- KEYS  1 prompts  2 groups  3 ledger  4 closed  5 arrived  6 outstanding  7 expiries  8 contained  9 partial
-- ARGV  1 consumer group  2 consumer  3 entry id of the lease  4 group id  5 released at (ms; '': now)  6 prompt
--       7 group
-- Returns 1: done, by this call or by an earlier copy of it. 0: the lease was taken over, or an earlier copy did it and
-- the group has left the stream since; counted as duplicate, once.
local entry_id, group_id = ARGV[3], ARGV[4]
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function remember(mark) redis.call('ZADD', KEYS[4], now(), entry_id .. ' ' .. mark) end
local function marked(mark) return redis.call('ZSCORE', KEYS[4], entry_id .. ' ' .. mark) end

local function here()  -- whether the group is in the stream, and came through this lease
  local arrived = redis.call('HGET', KEYS[5], group_id)
  return arrived and string.match(arrived, '%S+$') == entry_id
end

-- Whoever knows the id holds the lease: an entry is delivered once, and taking it back makes another one.
if redis.call('XACK', KEYS[1], ARGV[1], entry_id) == 0 then
  if here() or marked('submitted') then return 1 end
  if not marked('duplicate') then
    remember('duplicate')
    redis.call('HINCRBY', KEYS[3], 'duplicates', 1)
  end
  return 0
end
redis.call('XDEL', KEYS[1], entry_id)
redis.call('HINCRBY', KEYS[3], 'submitted', 1)

if redis.call('EXISTS', KEYS[8], KEYS[9]) > 0 then  -- both are rare: one call asks for the two
  redis.call('HDEL', KEYS[9], group_id)
  if redis.call('ZREM', KEYS[8], group_id) == 1 then
    -- The weights contain it since before this server lost its first submission.
    redis.call('HINCRBY', KEYS[3], 'trained', 1)
    redis.call('HINCRBY', KEYS[3], 'settled', 1)
    redis.call('ZREM', KEYS[6], group_id)
    redis.call('HDEL', KEYS[7], group_id)
    remember('submitted')
    return 1
  end
end
-- The prompt stays beside its group: should the group expire, it is sampled again.
local released = ARGV[5] ~= '' and ARGV[5] or now()
local id = redis.call(
  'XADD', KEYS[2], '*', 'g', group_id, 't', released, 'c', ARGV[2], 'q', ARGV[6], 'p', ARGV[7])
redis.call('HSET', KEYS[5], group_id, id .. ' ' .. entry_id)
return 1

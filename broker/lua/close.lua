#!lua flags=allow-oom
-- Ends a lease: the one way a prompt leaves a generator's hands. The entry goes and its outcome is written in one step.
-- Runs at the memory limit too, but for a submission, which producers wait with (`broker.link.GROWING`).
-- KEYS  1 prompts  2 groups  3 dead  4 ledger  5 closed  6 arrived  7 events  8 outstanding  9 expiries  10 contained
-- ARGV  1 consumer group  2 consumer  3 entry id
--       4 outcome: submitted | filtered_correct | filtered_wrong | filtered_equal | retried | dead
--       5 group id ('' where unknown)  6 payload: the group, or the prompt to release again
--       7 error  8 kind (dead)
-- Returns 1: done, by this call or by an earlier copy of it. 0: the lease was taken over; results are counted as
-- duplicates, once. An error where the group id is not the lease's.
local entry_id, outcome = ARGV[3], ARGV[4]
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function remember(mark, at) redis.call('ZADD', KEYS[5], at, entry_id .. ' ' .. mark) end

local entry = redis.call('XRANGE', KEYS[1], entry_id, entry_id)[1]
local fields, f = entry and entry[2] or {}, {}
for i = 1, #fields, 2 do f[fields[i]] = fields[i + 1] end
local group_id = f.g
if group_id and ARGV[5] ~= '' and ARGV[5] ~= group_id then
  return redis.error_reply('MISMATCH lease ' .. entry_id .. ' is of group ' .. group_id .. ', not of ' .. ARGV[5])
end

-- Whoever knows the id holds the lease: an entry is delivered once, and taking it back makes another one.
if redis.call('XACK', KEYS[1], ARGV[1], entry_id) == 0 then
  if redis.call('ZSCORE', KEYS[5], entry_id .. ' ' .. outcome) then return 1 end
  local result = outcome ~= 'retried' and outcome ~= 'dead'
  if result and not redis.call('ZSCORE', KEYS[5], entry_id .. ' duplicate') then
    remember('duplicate', now())
    redis.call('HINCRBY', KEYS[4], 'duplicates', 1)
  end
  return 0
end

redis.call('XDEL', KEYS[1], entry_id)
local at = outcome ~= 'submitted' and now()

if outcome == 'retried' then
  redis.call('XADD', KEYS[1], '*', 'g', group_id or ARGV[5], 't', f.t or at, 'p', ARGV[6])
  remember(outcome, at)
  return 1
end
if outcome == 'submitted' and redis.call('ZREM', KEYS[10], group_id or ARGV[5]) == 1 then
  -- The weights contain it since before this server lost its first submission.
  redis.call('HINCRBY', KEYS[4], 'trained', 1)
  redis.call('HINCRBY', KEYS[4], 'settled', 1)
  redis.call('ZREM', KEYS[8], group_id or ARGV[5])
  redis.call('HDEL', KEYS[9], group_id or ARGV[5])
elseif outcome == 'submitted' then
  -- The prompt stays beside its group: should the group expire, it is sampled again.
  local id = redis.call(
    'XADD', KEYS[2], '*', 'g', group_id or ARGV[5], 't', f.t or now(), 'c', ARGV[2], 'q', f.p or '', 'p', ARGV[6])
  redis.call('HSET', KEYS[6], group_id or ARGV[5], id)
  at = string.match(id, '^%d+')  -- the server's clock, without asking for it
elseif outcome == 'dead' then
  local kind = group_id and redis.call('ZSCORE', KEYS[8], group_id) and ARGV[8] or 'foreign'
  if kind == 'foreign' then outcome = nil end
  while #fields > 64 do table.remove(fields) end  -- foreign entries may have any number; unpack may not
  local room = kind == 'data' and 2 ^ 31 or 65536  -- bytes that are kept of what cannot be read
  for j, value in ipairs(fields) do fields[j] = string.sub(value, 1, room); room = math.max(0, room - #value) end
  for _, value in ipairs({'error', ARGV[7], 'kind', kind, 'by', ARGV[2]}) do
    fields[#fields + 1] = value
  end
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', unpack(fields))
end
remember(ARGV[4], at or now())
if not outcome then return 1 end  -- it was never released; it must not disturb the equation
redis.call('HINCRBY', KEYS[4], outcome, 1)
if outcome ~= 'submitted' then
  if group_id then
    redis.call('ZREM', KEYS[8], group_id)
    redis.call('HDEL', KEYS[9], group_id)
  end
  redis.call('XADD', KEYS[7], 'MAXLEN', 100, '*', 'e', outcome)
end
return 1

#!lua flags=allow-oom
-- Ends a lease without a group (see submit): the entry goes and its outcome is written in one step.
-- KEYS  1 prompts  2 dead  3 ledger  4 closed  5 events  6 outstanding  7 expiries  8 partial
-- ARGV  1 consumer group  2 consumer  3 entry id
--       4 outcome: filtered_correct | filtered_wrong | filtered_equal | retried | dead
--       5 group id ('' where unknown)  6 the prompt to release again (retried)
--       7 error  8 kind (dead)  9 keep (retried): what was sampled of it stays beside the prompt
-- Returns 1: done, by this call or by an earlier copy of it. 0: the lease was taken over; results are counted as
-- duplicates, once. An error where the group id is not the lease's.
local entry_id, outcome = ARGV[3], ARGV[4]
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function remember(mark, at) redis.call('ZADD', KEYS[4], at, entry_id .. ' ' .. mark) end

local entry = redis.call('XRANGE', KEYS[1], entry_id, entry_id)[1]
local fields, f = entry and entry[2] or {}, {}
for i = 1, #fields, 2 do f[fields[i]] = fields[i + 1] end
local group_id = f.g
if group_id and ARGV[5] ~= '' and ARGV[5] ~= group_id then
  return redis.error_reply('MISMATCH lease ' .. entry_id .. ' is of group ' .. group_id .. ', not of ' .. ARGV[5])
end

-- Whoever knows the id holds the lease: an entry is delivered once, and taking it back makes another one.
if redis.call('XACK', KEYS[1], ARGV[1], entry_id) == 0 then
  if redis.call('ZSCORE', KEYS[4], entry_id .. ' ' .. outcome) then return 1 end
  local result = outcome ~= 'retried' and outcome ~= 'dead'
  if result and not redis.call('ZSCORE', KEYS[4], entry_id .. ' duplicate') then
    remember('duplicate', now())
    redis.call('HINCRBY', KEYS[3], 'duplicates', 1)
  end
  return 0
end

redis.call('XDEL', KEYS[1], entry_id)
local at = now()
if group_id and ARGV[9] ~= 'keep' then redis.call('HDEL', KEYS[8], group_id) end

if outcome == 'retried' then
  redis.call('XADD', KEYS[1], '*', 'g', group_id or ARGV[5], 't', f.t or at, 'p', ARGV[6])
  remember(outcome, at)
  return 1
end
if outcome == 'dead' then
  local kind = group_id and redis.call('ZSCORE', KEYS[6], group_id) and ARGV[8] or 'foreign'
  if kind == 'foreign' then outcome = nil end
  while #fields > 64 do table.remove(fields) end  -- foreign entries may have any number; unpack may not
  local room = kind == 'data' and 2 ^ 31 or 65536  -- bytes that are kept of what cannot be read
  for j, value in ipairs(fields) do fields[j] = string.sub(value, 1, room); room = math.max(0, room - #value) end
  for _, value in ipairs({'error', ARGV[7], 'kind', kind, 'by', ARGV[2]}) do
    fields[#fields + 1] = value
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', unpack(fields))
end
remember(ARGV[4], at)
if not outcome then return 1 end  -- it was never released; it must not disturb the equation
redis.call('HINCRBY', KEYS[3], outcome, 1)
if group_id then
  redis.call('ZREM', KEYS[6], group_id)
  redis.call('HDEL', KEYS[7], group_id)
end
redis.call('XADD', KEYS[5], 'MAXLEN', 100, '*', 'e', outcome)
return 1

#!lua flags=no-writes
-- Where the longest waiting groups are: of those outstanding, and of those trained but not settled, the one released at
-- the oldest version (of several, the one of the lowest id).
-- KEYS  1 prompts  2 groups  3 outstanding  4 unsettled  5 arrived  6 expiries  7 state
-- ARGV  1 consumer group of prompts  2 consumer group of groups, less its epoch
-- Returns {outstanding, unsettled, expiries as a flat list}; the first two are {} or {group id, stream it is in,
-- consumer that holds it or '', milliseconds since its release}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local function queued(group_id)  -- the entry of an unanswered prompt
  local start = '-'
  while true do
    local page = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', 64)
    for _, entry in ipairs(page) do
      if field(entry, 'g') == group_id then return entry end
    end
    if #page < 64 then return end
    start = '(' .. page[#page][1]
  end
end

local function find(key)
  local group_id = redis.call('ZRANGE', key, 0, 0)[1]
  if not group_id then return {} end
  local arrived = redis.call('HGET', KEYS[5], group_id)
  local id = arrived and string.match(arrived, '^%S+')
  local epoch = redis.call('HGET', KEYS[7], 'epoch')
  local stream, group = id and 2 or 1, id and ARGV[2] .. '-' .. (epoch or '') or ARGV[1]
  local entry = id and redis.call('XRANGE', KEYS[2], id, id)[1] or not id and queued(group_id)
  if not entry then return {group_id, 'nowhere', '', 0} end
  local held = (not id or epoch) and redis.call('XPENDING', KEYS[stream], group, entry[1], entry[1], 1) or {}
  local holder = held[1]
  return {group_id, id and 'groups' or 'prompts', holder and holder[2] or '', now - tonumber(field(entry, 't') or now)}
end

return {find(KEYS[3]), find(KEYS[4]), redis.call('HGETALL', KEYS[6])}

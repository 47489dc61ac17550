#!lua flags=allow-oom
-- Takes back leases nobody works on and releases their prompts again as new entries. The old entry ids are gone, which
-- fences their holders. Also forgets members and consumers that have been gone for long, and leases that ended long ago.
-- KEYS  1 prompts  2 members  3 closed
-- ARGV  1 consumer group  2 lease_ttl_ms  3 member_ttl_ms  4 most leases to take back
-- A lease is taken back when it was idle for lease_ttl_ms, or for the shorter of the two where its holder is not a
-- living member.
-- Returns, for each lease taken back: old entry id, consumer.
local lease_ttl, member_ttl, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 600000)

local living = {}
local members = redis.call('HGETALL', KEYS[2])
for i = 1, #members, 2 do
  local seen = tonumber(string.match(members[i + 1], '^(%d+) ') or '0')
  if now - seen <= member_ttl then living[members[i]] = true
  elseif now - seen > 10 * member_ttl then redis.call('HDEL', KEYS[2], members[i]) end
end

local stuck, start = {}, '-'
local idle = math.min(lease_ttl, member_ttl)
while #stuck < limit do
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', idle, start, '+', 256)
  for _, e in ipairs(page) do
    if (e[3] >= lease_ttl or not living[e[2]]) and #stuck < limit then stuck[#stuck + 1] = e end
  end
  if #page < 256 then break end
  start = '(' .. page[#page][1]
end

local out = {}
for _, e in ipairs(stuck) do
  local entry = redis.call('XRANGE', KEYS[1], e[1], e[1])[1]
  redis.call('XACK', KEYS[1], ARGV[1], e[1])
  if entry then
    redis.call('XDEL', KEYS[1], e[1])
    redis.call('XADD', KEYS[1], '*', unpack(entry[2], 1, math.min(#entry[2], 64)))
    out[#out + 1] = {e[1], e[2]}
  end
end

for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #flat, 2 do c[flat[i]] = flat[i + 1] end
  if not living[c.name] and c.pending == 0 and c.idle > 10 * member_ttl then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c.name)
  end
end
return out

#!lua flags=allow-oom
-- Delivers groups to the learner. A call that is sent twice gets the same groups twice instead of losing the first lot.
-- KEYS  1 groups  2 state  3 arrived
-- ARGV  1 consumer group  2 epoch  3 count  4 id of this request
-- Returns {last id of the stream ('' where there are entries), entries}, an entry being {entry id, group id or '',
-- payload or '', 1 if it came through a lease}. An error FENCED where the epoch is over.
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return redis.error_reply('FENCED learner epoch ' .. ARGV[2]) end
local entries = {}
if redis.call('HGET', KEYS[2], 'take_request') == ARGV[4] then
  for id in string.gmatch(redis.call('HGET', KEYS[2], 'take_ids'), '%S+') do
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then entries[#entries + 1] = entry end
  end
else
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], 'epoch-' .. ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
  entries = reply and reply[1][2] or {}
  local ids = {}
  for i, entry in ipairs(entries) do ids[i] = entry[1] end
  if #ids > 0 then
    redis.call('HSET', KEYS[2], 'take_request', ARGV[4], 'take_ids', table.concat(ids, ' '))
  end
end
local out = {}
for i, entry in ipairs(entries) do
  local f = {}
  for j = 1, #entry[2], 2 do f[entry[2][j]] = entry[2][j + 1] end
  local known = f.g and redis.call('HGET', KEYS[3], f.g) == entry[1]
  out[i] = {entry[1], f.g or '', f.p or '', known and 1 or 0}
end
if #out > 0 then return {'', out} end
local info, last = redis.call('XINFO', 'STREAM', KEYS[1]), '0-0'
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then last = info[i + 1] end
end
return {last, out}

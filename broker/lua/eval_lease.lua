#!lua flags=allow-oom
-- Hands a generator one evaluation prompt. What it holds already comes first: it asks only when it works on none, so that
-- was lost on its way, or held by its predecessor of the same name.
-- KEYS  1 eval  2 rounds  3 answers
-- ARGV  1 consumer group  2 consumer  3 version the generator samples with
-- Returns {entry id, version of the round, index, packed prompt}, or nothing: no prompt, or the generator is too old.
local round = redis.call('HGET', KEYS[2], 'round')
if not round or tonumber(ARGV[3]) < tonumber(round) then return false end
for _, from in ipairs({'0', '>'}) do
  while true do
    local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], from)
    local entry = reply and reply[1][2][1]
    if not entry then break end
    local f, flat = {}, entry[2] or {}
    for i = 1, #flat, 2 do f[flat[i]] = flat[i + 1] end
    if f.r == round and string.match(f.i or '', '^%d+$') and f.p and redis.call('HEXISTS', KEYS[3], f.i) == 0 then
      return {entry[1], f.r, f.i, f.p}
    end
    redis.call('XACK', KEYS[1], ARGV[1], entry[1])
    redis.call('XDEL', KEYS[1], entry[1])
  end
end
return false

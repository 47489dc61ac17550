#!lua flags=allow-oom
-- Removes groups that will not be trained: too old, or not a group at all.
-- KEYS  1 groups  2 dead  3 ledger  4 state  5 arrived  6 unsettled  7 events
-- ARGV  1 consumer group  2 epoch  3 counter: expired | dead  4 error (dead), then entry id and group id of each
-- Returns how many entries went. An error FENCED where the epoch is over.
-- Entries that did not come through a lease were never released: they are removed and not counted. Trained ones stay.
if redis.call('HGET', KEYS[4], 'epoch') ~= ARGV[2] then return redis.error_reply('FENCED learner epoch ' .. ARGV[2]) end
local gone, counted = 0, 0
for i = 5, #ARGV, 2 do
  local id, group_id = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', KEYS[6], group_id) ~= id then
    local entry = ARGV[3] == 'dead' and redis.call('XRANGE', KEYS[1], id, id)[1]
    redis.call('XACK', KEYS[1], ARGV[1], id)
    local deleted = redis.call('XDEL', KEYS[1], id)
    gone = gone + deleted
    if entry then
      local room = 65536  -- bytes of it that are kept
      for j, value in ipairs(entry[2]) do entry[2][j] = string.sub(value, 1, room); room = math.max(0, room - #value) end
      local fields = entry[2]
      while #fields > 64 do table.remove(fields) end  -- foreign entries may have any number; unpack may not
      fields[#fields + 1] = 'error'; fields[#fields + 1] = ARGV[4]
      fields[#fields + 1] = 'from'; fields[#fields + 1] = 'groups'
      redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', unpack(fields))
    end
    if deleted == 1 and redis.call('HGET', KEYS[5], group_id) == id then
      redis.call('HDEL', KEYS[5], group_id)
      counted = counted + 1
    end
  end
end
if gone > 0 then
  redis.call('HINCRBY', KEYS[3], ARGV[3], counted)
  redis.call('XADD', KEYS[7], 'MAXLEN', 100, '*', 'e', ARGV[3])
end
return gone

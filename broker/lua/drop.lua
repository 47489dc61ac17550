#!lua flags=allow-oom
-- Removes groups that will not be trained: too old, or not a group at all. Where a prompt comes with it, that is released
-- again in the same step, under the version it says: released counts it a second time, as expired does.
-- KEYS  1 groups  2 dead  3 ledger  4 state  5 arrived  6 unsettled  7 events  8 prompts  9 outstanding  10 expiries
-- ARGV  1 consumer group  2 epoch  3 counter: expired | dead  4 error (dead)  5 version of a release,
--       then entry id, group id and packed prompt ('': it is not released again) of each
-- Returns how many entries went. An error FENCED where the epoch is over.
-- Entries that did not come through a lease were never released: they are removed and not counted. Trained ones stay.
if redis.call('HGET', KEYS[4], 'epoch') ~= ARGV[2] then return redis.error_reply('FENCED learner epoch ' .. ARGV[2]) end
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local gone, counted, again = 0, 0, 0
for i = 6, #ARGV, 3 do
  local id, group_id, prompt = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local arrived = redis.call('HGET', KEYS[5], group_id)
  local known = arrived and string.match(arrived, '^%S+') == id
  if not (known and redis.call('ZSCORE', KEYS[6], group_id)) then
    local entry = ARGV[3] == 'dead' and redis.call('XRANGE', KEYS[1], id, id)[1]
    redis.call('XACK', KEYS[1], ARGV[1], id)
    local deleted = redis.call('XDEL', KEYS[1], id)
    gone = gone + deleted
    if entry then
      local fields = entry[2]
      while #fields > 64 do table.remove(fields) end  -- foreign entries may have any number; unpack may not
      local room = 65536  -- bytes that are kept, beside the prompt, which may be sampled again
      for j, value in ipairs(fields) do
        if not (known and fields[j - 1] == 'q') then
          fields[j] = string.sub(value, 1, room)
          room = math.max(0, room - #value)
        end
      end
      for _, value in ipairs({'error', ARGV[4], 'kind', known and 'damaged' or 'foreign'}) do
        fields[#fields + 1] = value
      end
      redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', unpack(fields))
    end
    if deleted == 1 and known then
      redis.call('HDEL', KEYS[5], group_id)
      counted = counted + 1
      if prompt ~= '' then
        redis.call('XADD', KEYS[8], '*', 'g', group_id, 't', now, 'p', prompt)
        redis.call('ZADD', KEYS[9], ARGV[5], group_id)
        redis.call('HINCRBY', KEYS[10], group_id, 1)
        again = again + 1
      else
        redis.call('ZREM', KEYS[9], group_id)
        redis.call('HDEL', KEYS[10], group_id)
      end
    end
  end
end
if gone > 0 then
  redis.call('HINCRBY', KEYS[3], ARGV[3], counted)
  redis.call('HINCRBY', KEYS[3], 'released', again)
  redis.call('HINCRBY', KEYS[3], 'rereleased', again)
  redis.call('XADD', KEYS[7], 'MAXLEN', 100, '*', 'e', ARGV[3])
end
return gone

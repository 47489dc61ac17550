#!lua flags=allow-oom
-- Records that groups were trained by the optimizer steps that made a version: they stay in the stream until their effect
-- is durable, and no longer count as outstanding. Then acknowledges and deletes trained groups whose effect is.
-- KEYS  1 groups  2 ledger  3 state  4 arrived  5 unsettled  6 events  7 outstanding  8 expiries
-- ARGV  1 consumer group  2 epoch  3 version ('': no step)  4 how many groups the steps trained, then their ids, then
--       their entry ids, then the ids of groups whose effect is durable
-- Returns how many were settled now. An error FENCED where the epoch is over; an error LOST, and nothing written, where
-- the server has lost writes that the learner knows of: an earlier step, or these groups, or their delivery.
if redis.call('HGET', KEYS[3], 'epoch') ~= ARGV[2] then return redis.error_reply('FENCED learner epoch ' .. ARGV[2]) end
local groups = tonumber(ARGV[4])

local function parts(first, last, work)  -- of at most 1000, since unpack may not have many more
  for begin = first, last, 1000 do work(begin, math.min(begin + 999, last)) end
end

local known, gone, again = 0, 0, 0
parts(5, 4 + groups, function(first, last)
  for i, arrived in ipairs(redis.call('HMGET', KEYS[4], unpack(ARGV, first, last))) do
    if not arrived then gone = gone + 1
    elseif string.match(arrived, '^%S+') == ARGV[first - 1 + i + groups] then known = known + 1 end
  end
  for _, score in ipairs(redis.call('ZMSCORE', KEYS[5], unpack(ARGV, first, last))) do
    if score then again = again + 1 end
  end
end)
local version = ARGV[3] ~= '' and redis.call('HGET', KEYS[3], 'version')
local twice = version == ARGV[3] and (known == groups and again == groups or gone == groups and #ARGV > 4 + 2 * groups)
if ARGV[3] ~= '' and not twice then
  if known < groups or again > 0 or tonumber(version or '0') + 1 ~= tonumber(ARGV[3]) then
    return redis.error_reply('LOST writes of learner epoch ' .. ARGV[2] .. ' before version ' .. ARGV[3])
  end
  parts(5, 4 + groups, function(first, last)
    local scored = {}
    for i, score in ipairs(redis.call('ZMSCORE', KEYS[7], unpack(ARGV, first, last))) do
      scored[2 * i - 1], scored[2 * i] = score or '0', ARGV[first - 1 + i]
    end
    redis.call('ZADD', KEYS[5], unpack(scored))
    redis.call('ZREM', KEYS[7], unpack(ARGV, first, last))
  end)
  redis.call('HINCRBY', KEYS[2], 'trained', groups)
  redis.call('HSET', KEYS[3], 'version', ARGV[3])
  redis.call('XADD', KEYS[6], 'MAXLEN', 100, '*', 'e', 'step')
end

local settled = 0
parts(5 + 2 * groups, #ARGV, function(first, last)
  local arrived = redis.call('HMGET', KEYS[4], unpack(ARGV, first, last))
  local ids, entries = {}, {}
  for i, score in ipairs(redis.call('ZMSCORE', KEYS[5], unpack(ARGV, first, last))) do
    if score then
      ids[#ids + 1], entries[#entries + 1] = ARGV[first - 1 + i], string.match(arrived[i], '^%S+')
    end
  end
  if #ids == 0 then return end
  redis.call('XACK', KEYS[1], ARGV[1], unpack(entries))
  redis.call('XDEL', KEYS[1], unpack(entries))
  redis.call('HDEL', KEYS[4], unpack(ids))
  redis.call('HDEL', KEYS[8], unpack(ids))
  settled = settled + redis.call('ZREM', KEYS[5], unpack(ids))
end)
if settled > 0 then redis.call('HINCRBY', KEYS[2], 'settled', settled) end
return settled

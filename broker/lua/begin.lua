#!lua flags=allow-oom
-- A new incarnation of the learner. Older ones are fenced; what the restored checkpoint contains is settled; everything
-- else in the stream, trained or not, will be delivered again.
-- KEYS  1 groups  2 ledger  3 state  4 arrived  5 unsettled  6 events  7 outstanding  8 expiries  9 contained
-- ARGV  1 consumer group, less its epoch  2 version of the restored weights, then the group ids they contain
-- Returns the new epoch: higher than all before it, and no other learner's.
local trained, settled = 0, 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV do
  local arrived = redis.call('HGET', KEYS[4], ARGV[i])
  if arrived then
    redis.call('XDEL', KEYS[1], string.match(arrived, '^%S+'))
    redis.call('HDEL', KEYS[4], ARGV[i])
    redis.call('HDEL', KEYS[8], ARGV[i])
    redis.call('ZREM', KEYS[7], ARGV[i])
    -- In the checkpoint but not counted yet: the old learner died between its optimizer step and telling us.
    if redis.call('ZREM', KEYS[5], ARGV[i]) == 0 then trained = trained + 1 end
    settled = settled + 1
  else
    -- Settled long ago; or this server lost the group, and will be given it again: see close.
    redis.call('ZADD', KEYS[9], now, ARGV[i])
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[9], '-inf', now - 3600000)
trained = trained - redis.call('ZCARD', KEYS[5])
redis.call('ZUNIONSTORE', KEYS[7], 2, KEYS[7], KEYS[5], 'AGGREGATE', 'MAX')
redis.call('DEL', KEYS[5])
redis.call('HINCRBY', KEYS[2], 'trained', trained)
redis.call('HINCRBY', KEYS[2], 'settled', settled)
-- A fresh consumer group reads the stream from its start: every entry still there is undelivered again, in order. An
-- older learner's is gone, so that it can take nothing.
-- Not the one after the last: a server that lost its last second would give two learners the same epoch.
local before = redis.call('HGET', KEYS[3], 'epoch') or '0'
local epoch = string.format('%.0f', math.max(tonumber(before) + 1, now))
redis.call('HSET', KEYS[3], 'epoch', epoch)
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1] .. '-' .. epoch, '0', 'MKSTREAM')
redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[1] .. '-' .. before)
redis.call('HDEL', KEYS[3], 'finished')
redis.call('HSET', KEYS[3], 'version', ARGV[2])
redis.call('XADD', KEYS[6], 'MAXLEN', 100, '*', 'e', 'begin')
return epoch

#!lua flags=allow-oom
-- Marks the run as finished.
-- KEYS  1 state  2 events
if redis.call('HSET', KEYS[1], 'finished', 1) == 1 then
  redis.call('XADD', KEYS[2], 'MAXLEN', 100, '*', 'e', 'finish')
end
return 1

#!lua flags=allow-oom
-- Appends a message to a capped stream, once even if it is sent twice.
-- KEYS  1 stream
-- ARGV  1 id of this request  2 packed message  3 length of the stream
-- Returns the entry's id.
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 64)) do
  if entry[2][2] == ARGV[1] then return entry[1] end
end
return redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3], '*', 'n', ARGV[1], 'p', ARGV[2])

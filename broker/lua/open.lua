#!lua flags=allow-oom
-- Makes the consumer groups a run's streams are read through, where they are not there yet. Runs at the memory limit
-- too: a learner that starts again is what frees memory.
-- KEYS  streams
-- ARGV  consumer group of each
-- Returns how many were made.
local made = 0
for i, stream in ipairs(KEYS) do
  local reply = redis.pcall('XGROUP', 'CREATE', stream, ARGV[i], '0', 'MKSTREAM')
  if not reply.err then made = made + 1
  elseif not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
end
return made

"""The scripts of a sink in Redis: each checks and writes in one step, and can be sent twice.

Redis may restart, or a replica take its place, without the last writes that it acknowledged; those
before are there. So the scripts of an attempt are counted (`written`): one that comes after a lost
one is refused, and so is the commit.

Answers: 1: done. REPLACED: another publisher has begun or committed. LOST: writes are lost.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BEGIN", "COMMIT", "DENSE", "LOST", "PUT", "REMOVE", "REPLACED", "RETIRE"]

REPLACED: Final = -1
LOST: Final = -2

#: KEYS: position. ARGV: token, number of the committed version, `in_place` as it was read ("" for
#: none), version to come or "" if its rows come beside those that readers see, count of new table
#: numbers.
#: Returns the first new table number, or REPLACED.
BEGIN: Final = """
local position = redis.call('HMGET', KEYS[1], 'number', 'in_place', 'writer')
local number = position[1] or '0'
if position[3] ~= ARGV[1] then
  if number ~= ARGV[2] or (position[2] or '') ~= ARGV[3] then return -1 end
  redis.call('HSET', KEYS[1], 'writer', ARGV[1], 'readable_from', number, 'written', '0')
  if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'in_place', ARGV[4]) end
end
return redis.call('HINCRBY', KEYS[1], 'next_table', ARGV[5]) - ARGV[5]
"""

_FENCE: Final = """
local position = redis.call('HMGET', KEYS[1], 'writer', 'written')
if position[1] ~= ARGV[1] then return -1 end
local written, script = tonumber(position[2]), tonumber(ARGV[2])
if script > written + 1 then return -2 end
if script > written then redis.call('HSET', KEYS[1], 'written', ARGV[2]) end
"""

#: KEYS: position. ARGV: token, number of this script in its attempt, number of the committed
#: version, start of the rows' keys, bytes of a row (0: delete), ids (text, one a line), rows one
#: after another.
PUT: Final = (
    _FENCE
    + """
local seen, size, place = tonumber(ARGV[3]), tonumber(ARGV[5]), 1
local mark = struct.pack('<I6I2', seen + 1, (size == 0) and 1 or 0)
local no_mark = string.rep('\\0', 8)
for id in string.gmatch(ARGV[6], '[^\\n]+') do
  local key, row = ARGV[4] .. id, ''
  if size > 0 then row = string.sub(ARGV[7], place, place + size - 1); place = place + size end
  local head = redis.call('GETRANGE', key, 0, 15)
  if #head < 16 then
    if size > 0 then redis.call('SET', key, mark .. no_mark .. row) end
  else
    local first, _, second = struct.unpack('<I6I2I6', head)
    local slot = 0
    if first <= seen and (second > seen or first > second) then slot = 1 end
    if size > 0 then redis.call('SETRANGE', key, 16 + slot * size, row) end
    redis.call('SETRANGE', key, 8 * slot, mark)
  end
end
return 1
"""
)

#: KEYS: position, dense. ARGV: token, number of this script in its attempt, dense.
DENSE: Final = _FENCE + "redis.call('SET', KEYS[2], ARGV[3])\nreturn 1\n"

#: KEYS: position. ARGV: token, count of the attempt's scripts, number, record, numbers.
COMMIT: Final = """
local position = redis.call('HMGET', KEYS[1], 'writer', 'written', 'committed_by')
if position[1] ~= ARGV[1] then return (position[3] == ARGV[1]) and 1 or -1 end
if position[2] ~= ARGV[2] then return -2 end
redis.call('HSET', KEYS[1], 'number', ARGV[3], 'record', ARGV[4], 'numbers', ARGV[5],
    'committed_by', ARGV[1], 'parent_by', position[3] or '')
redis.call('HDEL', KEYS[1], 'writer', 'in_place', 'written')
return 1
"""

#: KEYS: position. ARGV: number of a committed version. Readers of older ones are refused from now
#: on.
RETIRE: Final = """
local position = redis.call('HMGET', KEYS[1], 'number', 'readable_from')
if tonumber(position[1] or '0') < tonumber(ARGV[1]) then return -2 end
if tonumber(ARGV[1]) > tonumber(position[2] or '0') then
  redis.call('HSET', KEYS[1], 'readable_from', ARGV[1])
end
return 1
"""

#: KEYS: position, keys that no version needs from a committed one on. ARGV: its number.
REMOVE: Final = """
local number = redis.call('HGET', KEYS[1], 'number') or '0'
if tonumber(number) < tonumber(ARGV[1]) then return -2 end
redis.call('UNLINK', unpack(KEYS, 2))
return 1
"""

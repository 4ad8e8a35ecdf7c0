"""A sink in Redis or Valkey: readers see whole versions, and no version is copied to make the next.

Keys, P being the prefix in braces (so that a cluster keeps all of them on one node):

    P:position      hash: what readers see (`number`, `record`, `numbers`), the first version that
                    can still be read (`readable_from`), who may write (`writer`), and of which
                    version rows may lie among those that readers see (`in_place`)
    P:dense:N       dense layers of version N, a safetensors file
    P:T:I           row I of the table with the number T: one or two slots

A row has one slot for the version that readers see and one for the version to come:

    bytes 0-7       number of the version that wrote slot 0, 6 bytes, and flags, 2 bytes
    bytes 8-15      the same of slot 1; zeros: the slot is empty
    then            the row in slot 0, and the row in slot 1 if there is one

A reader of version N takes the slot with the highest number up to N. A flag of 1 says that this
version deleted the row. A version that comes anew gets new table numbers, so its rows lie beside
those that readers see, and the old ones are removed afterwards.

Scripts check the writer's token before they write: a publisher that was stopped and goes on after
another has begun writes nothing. Each script can be sent twice.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry
from torch import Tensor

from recpoint.catalog.store.durable import step
from recpoint.errors import MalformedObject, NotServing, SinkError
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.contract import Sink, SinkPosition, SinkReading, refuse_parent
from recpoint.serving.sinks.records import CommittedVersion, SinkVersion, TableChange, parsed
from recpoint.serving.sinks.row_bytes import (
    bytes_of_dense,
    dense_of_bytes,
    joined_bytes,
    rows_of_bytes,
    table_of,
)

__all__ = ["RedisSink"]

#: A script writes so many rows, so that readers wait for a fraction of a millisecond.
_ROWS_A_SCRIPT: Final = 128
#: Scripts that are under way at once.
_SCRIPTS_AT_ONCE: Final = 16
_RETRIES: Final = 6
_KEYS_A_SCAN: Final = 1000

#: KEYS: position. ARGV: token, number of the committed version, version to come or "" if its rows
#: come beside those that readers see, count of new table numbers.
#: Returns the first new table number, or -1 if another version was committed meanwhile.
_BEGIN: Final = """
local number = redis.call('HGET', KEYS[1], 'number') or '0'
if number ~= ARGV[2] then return -1 end
redis.call('HSET', KEYS[1], 'writer', ARGV[1], 'readable_from', number)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'in_place', ARGV[3]) end
return redis.call('HINCRBY', KEYS[1], 'next_table', ARGV[4]) - ARGV[4]
"""

#: KEYS: position. ARGV: token, number of the committed version, start of the rows' keys, bytes of a
#: row (0: delete), ids (text, one a line), rows one after another.
#: Returns 1, or -1 if another publisher has begun.
_PUT: Final = """
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[1] then return -1 end
local seen, size, place = tonumber(ARGV[2]), tonumber(ARGV[4]), 1
local mark = struct.pack('<I6I2', seen + 1, (size == 0) and 1 or 0)
local no_mark = string.rep('\\0', 8)
for id in string.gmatch(ARGV[5], '[^\\n]+') do
  local key, row = ARGV[3] .. id, ''
  if size > 0 then row = string.sub(ARGV[6], place, place + size - 1); place = place + size end
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

#: KEYS: position, dense. ARGV: token, dense.
_DENSE: Final = """
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""

#: KEYS: position. ARGV: token, number, record, numbers.
_COMMIT: Final = """
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[1] then
  if redis.call('HGET', KEYS[1], 'committed_by') == ARGV[1] then return 1 end
  return -1
end
redis.call('HSET', KEYS[1], 'number', ARGV[2], 'record', ARGV[3], 'numbers', ARGV[4],
    'committed_by', ARGV[1])
redis.call('HDEL', KEYS[1], 'writer', 'in_place')
return 1
"""

#: KEYS: position. ARGV: number. Readers of older versions are refused from now on.
_RETIRE: Final = """
local first = tonumber(redis.call('HGET', KEYS[1], 'readable_from') or '0')
if tonumber(ARGV[1]) > first then redis.call('HSET', KEYS[1], 'readable_from', ARGV[1]) end
return 1
"""


class _Attempt(NamedTuple):
    """What this process has begun.

    Attributes:
        token: tells its writes from those of others.
        number: number of the version.
        version, parent: as for `Sink.begin`.
        numbers: name of a table -> its number in keys.
        old_numbers: numbers of the tables of the committed version that this one does without.
    """

    token: str
    number: int
    version: SinkVersion
    parent: CheckpointRef | None
    numbers: Mapping[str, int]
    old_numbers: frozenset[int]


class RedisSink(Sink):
    """Holds versions in Redis.

    Args:
        url: of the server, as redis-py reads it, with a password if there is one.
        shown_url: the URL without the password.
        prefix: first part of all keys.
        grace_seconds: how long a version stays readable after the next one was committed. The next
            publication waits for that.
    """

    def __init__(self, url: str, shown_url: str, prefix: str, grace_seconds: float) -> None:
        self.url = shown_url
        self._prefix = f"{{{prefix}}}"
        self._grace_ms = round(grace_seconds * 1000)
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=2.0), _RETRIES)
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=30.0,
            socket_connect_timeout=10.0,
            retry=retry,
            retry_on_error=[redis.exceptions.ConnectionError, redis.exceptions.TimeoutError],
        )
        register = self._client.register_script
        self._begin, self._put = register(_BEGIN), register(_PUT)
        self._dense, self._commit = register(_DENSE), register(_COMMIT)
        self._retire = register(_RETIRE)
        self._attempt: _Attempt | None = None

    def position(self) -> SinkPosition:
        """See `Sink.position`."""
        return self._position(self._fields())

    def begin(self, version: SinkVersion, parent: CheckpointRef | None) -> None:
        """See `Sink.begin`. Waits until the grace of the committed version's parent is over."""
        self._refuse_eviction()
        fields = self._fields()
        position = self._position(fields)
        refuse_parent(self.url, position, version, parent)
        committed = position.committed
        seen = 0 if committed is None else committed.number
        self._wait_for_readers(committed)
        token = secrets.token_hex(16)
        new_tables = len(version.tables) if parent is None else 0
        with self._errors():
            step(f"sink-begin {self.url}")
            first = self._begin(
                keys=[self._key("position")],
                args=[
                    token,
                    seen,
                    "" if parent is None else version.model_dump_json(),
                    new_tables,
                ],
            )
        if first < 0:
            self._refuse_other(first)
        seen_numbers = _numbers(fields)
        numbers = seen_numbers
        if parent is None:
            names = [table.name for table in version.tables]
            numbers = {name: first + place for place, name in enumerate(names)}
        old_numbers = frozenset(seen_numbers.values()) - frozenset(numbers.values())
        self._attempt = _Attempt(token, seen + 1, version, parent, numbers, old_numbers)
        self._remove_dead(set(seen_numbers.values()), first, seen)

    def put(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """See `Sink.put`."""
        self._write(table, ids, joined_bytes(rows), rows.shape[1] * rows.element_size())

    def delete(self, table: str, ids: Tensor) -> None:
        """See `Sink.delete`."""
        self._write(table, ids, b"", 0)

    def commit(self, dense: Mapping[str, Tensor], changes: Sequence[TableChange]) -> None:
        """See `Sink.commit`."""
        attempt = self._begun()
        with self._errors():
            step(f"sink-dense {self.url}")
            keys = [self._key("position"), self._key(f"dense:{attempt.number}")]
            self._refuse_other(self._dense(keys=keys, args=[attempt.token, bytes_of_dense(dense)]))
            record = CommittedVersion(
                number=attempt.number,
                version=attempt.version,
                parent=attempt.parent,
                changes=tuple(changes),
                committed_ms=self._server_ms(),
            )
            step(f"sink-commit {self.url}")
            answer = self._commit(
                keys=[self._key("position")],
                args=[
                    attempt.token,
                    attempt.number,
                    record.model_dump_json(),
                    json.dumps(attempt.numbers),
                ],
            )
        self._refuse_other(answer)
        self._attempt = None
        if attempt.old_numbers:
            self._wait_for_readers(record)
            with self._errors():
                self._retire(keys=[self._key("position")], args=[attempt.number])
                self._remove_tables(attempt.old_numbers)

    def discard(self) -> None:
        """See `Sink.discard`: what was written stays until the next `begin`."""
        self._attempt = None

    @contextmanager
    def reading(self) -> Iterator[SinkReading]:
        """See `Sink.reading`."""
        fields = self._fields()
        committed = self._position(fields).committed
        if committed is None:
            raise NotServing(
                self.url,
                found=f"no version under the prefix {self._prefix}",
                expected="a version that was published",
                next_step="recpoint publish-to SINK URL",
            )
        yield _RedisReading(self, committed, _numbers(fields))

    def close(self) -> None:
        """See `Sink.close`."""
        self._client.close()

    def rows(self, number: int, table: int, ids: Sequence[int]) -> Sequence[bytes | None]:
        """Return what lies under the keys of rows, while a version can be read.

        Args:
            number: of the version.
            table: number of the table.
            ids: of the rows.
        """
        with self._errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hget(self._key("position"), "readable_from")
            if ids:
                pipeline.mget([self._key(f"{table}:{row}") for row in ids])
            readable_from, *rows = pipeline.execute()
        self._refuse_gone(number, readable_from)
        return rows[0] if rows else []

    def dense_bytes(self, number: int) -> bytes:
        """Return the dense layers of a version."""
        with self._errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hget(self._key("position"), "readable_from")
            pipeline.get(self._key(f"dense:{number}"))
            readable_from, data = pipeline.execute()
        self._refuse_gone(number, readable_from)
        if data is None:
            raise SinkError(
                f"{self.url} ({self._key(f'dense:{number}')})",
                found="no such key",
                expected="the dense layers of the version that readers see",
                next_step="set maxmemory-policy noeviction; recpoint publish-to SINK URL --replace",
            )
        return bytes(data)

    def stored_ids(self, table: int) -> Iterator[list[int]]:
        """Yield the ids of all rows under keys of a table, some at a time; some may come twice."""
        start = len(self._key(f"{table}:"))
        with self._errors():
            keys: list[int] = []
            for key in self._client.scan_iter(
                match=_literal(self._key(f"{table}:")) + "*", count=_KEYS_A_SCAN
            ):
                keys.append(int(key[start:]))
                if len(keys) >= _KEYS_A_SCAN:
                    yield keys
                    keys = []
            if keys:
                yield keys

    def _refuse_gone(self, number: int, readable_from: bytes | None) -> None:
        if readable_from is None or number < int(readable_from):
            raise NotServing(
                self.url,
                found=f"version {number}, whose rows are being replaced",
                expected=f"version {int(readable_from or 0)} or a later one",
                next_step="begin another block of reading(); or give the sink a longer grace: "
                f"?grace={self._grace_ms / 1000:g} now",
            )

    def _write(self, table: str, ids: Tensor, data: bytes, row_bytes: int) -> None:
        attempt = self._begun()
        keys = [self._key("position")]
        prefix = self._key(f"{attempt.numbers[table]}:")
        numbers = ids.tolist()
        with self._errors():
            for start in range(0, len(numbers), _ROWS_A_SCRIPT * _SCRIPTS_AT_ONCE):
                step(f"sink-put {self.url}")
                pipeline = self._client.pipeline(transaction=False)
                stop = min(start + _ROWS_A_SCRIPT * _SCRIPTS_AT_ONCE, len(numbers))
                for first in range(start, stop, _ROWS_A_SCRIPT):
                    last = min(first + _ROWS_A_SCRIPT, stop)
                    self._put(
                        keys=keys,
                        args=[
                            attempt.token,
                            attempt.number - 1,
                            prefix,
                            row_bytes,
                            "\n".join(map(str, numbers[first:last])),
                            data[first * row_bytes : last * row_bytes],
                        ],
                        client=pipeline,
                    )
                for answer in pipeline.execute():
                    self._refuse_other(answer)

    def _wait_for_readers(self, committed: CommittedVersion | None) -> None:
        """Wait until the version before the committed one need not be readable any more."""
        if committed is not None:
            wait_ms = committed.committed_ms + self._grace_ms - self._server_ms()
            time.sleep(min(max(wait_ms, 0), self._grace_ms) / 1000)

    def _remove_dead(self, seen_numbers: set[int], first_new: int, seen: int) -> None:
        """Remove tables and dense layers that neither readers nor this attempt need.

        Table numbers below `first_new` were given to attempts that cannot write any more: this one
        has taken their place.
        """
        with self._errors():
            removed = int(self._client.hget(self._key("position"), "removed_below") or 0)
            self._remove_tables(set(range(removed, first_new)) - seen_numbers)
            below = min((*seen_numbers, first_new))
            self._client.hset(self._key("position"), "removed_below", below)
            self._client.unlink(self._key(f"dense:{seen - 1}"))

    def _remove_tables(self, numbers: Collection[int]) -> None:
        for number in sorted(numbers):
            for ids in self.stored_ids(number):
                self._client.unlink(*(self._key(f"{number}:{row}") for row in ids))

    def _refuse_eviction(self) -> None:
        """Refuse a server that may throw rows away when memory is short."""
        with self._errors():
            policy = self._client.info("memory").get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SinkError(
                self.url,
                found=f"maxmemory-policy {policy}",
                expected="noeviction: a server that removes keys serves versions with holes",
                next_step="redis-cli CONFIG SET maxmemory-policy noeviction",
            )

    def _begun(self) -> _Attempt:
        if self._attempt is None:
            raise SinkError(
                self.url,
                found="no version that was begun",
                expected="begin() before put, delete and commit",
                next_step="call begin()",
            )
        return self._attempt

    def _refuse_other(self, answer: int) -> None:
        if answer == 1:
            return
        self._attempt = None
        raise SinkError(
            self.url,
            found="another publisher, which has begun to write",
            expected="one publisher for each sink",
            next_step="end one of them; what this one has put is not seen by readers",
        )

    def _fields(self) -> dict[bytes, bytes]:
        with self._errors():
            fields: dict[bytes, bytes] = self._client.hgetall(self._key("position"))
        return fields

    def _position(self, fields: Mapping[bytes, bytes]) -> SinkPosition:
        name = f"{self.url} ({self._key('position')})"
        record, in_place = fields.get(b"record"), fields.get(b"in_place")
        return SinkPosition(
            None if record is None else parsed(CommittedVersion, record, name=name),
            None if in_place is None else parsed(SinkVersion, in_place, name=name),
        )

    def _server_ms(self) -> int:
        with self._errors():
            seconds, microseconds = self._client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise self._failed(error, "room for two slots of each row that changes") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise self._failed(error, "a Redis server that answers") from error

    def _failed(self, error: Exception, expected: str) -> SinkError:
        return SinkError(
            self.url,
            found=f"{type(error).__name__}: {error}",
            expected=expected,
            next_step="see the message; readers see the version that was committed last",
        )


class _RedisReading:
    """See `SinkReading`."""

    def __init__(
        self, sink: RedisSink, version: CommittedVersion, numbers: Mapping[str, int]
    ) -> None:
        self._sink, self.version, self._numbers = sink, version, numbers

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        served = table_of(self._sink.url, self.version.version, table)
        stored = self._sink.rows(self.version.number, self._numbers[table], ids.tolist())
        rows = [self._seen(value, served.row_bytes) for value in stored]
        return rows_of_bytes(self._sink.url, served, ids, rows)

    def dense(self) -> dict[str, Tensor]:
        return dense_of_bytes(self._sink.dense_bytes(self.version.number))

    def row_count(self, table: str) -> int:
        served = table_of(self._sink.url, self.version.version, table)
        number = self._numbers[table]
        ids: set[int] = set()
        for some in self._sink.stored_ids(number):
            stored = self._sink.rows(self.version.number, number, some)
            ids.update(
                row
                for row, value in zip(some, stored, strict=True)
                if self._seen(value, served.row_bytes) is not None
            )
        return len(ids)

    def _seen(self, value: bytes | None, row_bytes: int) -> bytes | None:
        """Return the row in the slot that this version sees."""
        if value is None or len(value) < _HEAD.size:
            return None
        slots = (
            (number & _NUMBER, number >> 48, place)
            for place, number in enumerate(_HEAD.unpack_from(value))
        )
        number, flags, place = max(
            (slot for slot in slots if 0 < slot[0] <= self.version.number), default=(0, 0, 0)
        )
        if not number or flags:
            return None
        first = _HEAD.size + place * row_bytes
        return value[first : first + row_bytes]


_HEAD: Final = struct.Struct("<QQ")
_NUMBER: Final = (1 << 48) - 1


def _numbers(fields: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the numbers of tables in keys, by name."""
    data = fields.get(b"numbers")
    if data is None:
        return {}
    numbers = json.loads(data)
    if not isinstance(numbers, dict) or not all(type(n) is int for n in numbers.values()):
        raise MalformedObject(
            "the field numbers of a sink's position",
            found=f"{data[:200]!r}",
            expected="numbers of tables, by name",
            next_step="recpoint publish-to SINK URL --replace",
        )
    return numbers


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches a text alone."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)

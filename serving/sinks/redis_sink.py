"""A sink in Redis or Valkey: readers see whole versions, and no version is copied to make the next.

Keys, P being the prefix in braces (so that a cluster keeps all of them on one node):

    P:position      hash: what readers see (`number`, `record`, `numbers`), the first version that
                    can still be read (`readable_from`), the tokens of the attempts that committed
                    this version and the one before (`committed_by`, `parent_by`), who may write
                    (`writer`), of which version rows may lie among those that readers see
                    (`in_place`), and how many scripts of the attempt have written (`written`)
    P:dense:N       dense layers of version N, a safetensors file
    P:T:I           row I of the table with the number T: one or two slots

A row has one slot for the version that readers see and one for the version to come:

    bytes 0-7       number of the version that wrote slot 0, 6 bytes, and flags, 2 bytes
    bytes 8-15      the same of slot 1; zeros: the slot is empty
    then            the row in slot 0, and the row in slot 1 if there is one

A reader of version N takes the slot with the highest number up to N. A flag of 1 says that this
version deleted the row. A version that comes anew gets new table numbers, so its rows lie beside
those that readers see, and the old ones are removed afterwards.

The scripts check the writer's token before they write: a publisher that was stopped and goes on
after another has begun writes nothing.

A server that has lost a version gets another one with the same number. So a reader compares the
token, too: rows of that one would else pass for rows of its own.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, Final, NamedTuple

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry
from torch import Tensor

from recpoint.catalog.store.durable import step
from recpoint.errors import MalformedObject, NotServing, SinkError
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks import redis_scripts
from recpoint.serving.sinks.contract import Sink, SinkPosition, SinkReading, refuse_parent
from recpoint.serving.sinks.records import (
    EMPTY_FIRST,
    CommittedVersion,
    SinkVersion,
    TableChange,
    parsed,
)
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
#: A lookup asks for so many rows at once, so that other requests wait for little.
_ROWS_A_LOOKUP: Final = 1000


#: Fields of the position that say whether a version can be read.
_FIELDS_OF_READABLE: Final = ("readable_from", "number", "committed_by", "parent_by")


class _Readable(NamedTuple):
    """A version that a reader reads.

    Attributes:
        number: of the version.
        token: of the attempt that committed it.
    """

    number: int
    token: bytes


class _Attempt(NamedTuple):
    """What this process has begun.

    Attributes:
        token: tells its writes from those of others.
        number: number of the version.
        version, parent: as for `Sink.begin`.
        numbers: name of a table -> its number in keys.
        old_numbers: numbers of the tables of the committed version that this one does without.
        script_numbers: numbers of the scripts that write.
    """

    token: str
    number: int
    version: SinkVersion
    parent: CheckpointRef | None
    numbers: Mapping[str, int]
    old_numbers: frozenset[int]
    script_numbers: Iterator[int]


class RedisSink(Sink):
    """Holds versions in Redis.

    Args:
        url: of the server, as redis-py reads it, with a password if there is one.
        shown_url: the URL without the password.
        prefix: first part of all keys.
        grace_seconds: how long a version stays readable after the next one was committed. The next
            publication waits for that.

    Raises:
        Exception: of any class: redis-py has no such option, or it has another type.
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
        pool = self._client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # refuses options that it does not know
        register = self._client.register_script
        self._begin, self._put = register(redis_scripts.BEGIN), register(redis_scripts.PUT)
        self._dense, self._commit = register(redis_scripts.DENSE), register(redis_scripts.COMMIT)
        self._retire, self._remove = register(redis_scripts.RETIRE), register(redis_scripts.REMOVE)
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
                    fields.get(b"in_place", b""),
                    "" if parent is None else version.model_dump_json(),
                    new_tables,
                ],
            )
        if first < 0:
            self._refuse(first)
        seen_numbers = _numbers(fields)
        numbers = seen_numbers
        if parent is None:
            names = [table.name for table in version.tables]
            numbers = {name: first + place for place, name in enumerate(names)}
        old_numbers = frozenset(seen_numbers.values()) - frozenset(numbers.values())
        self._attempt = _Attempt(
            token, seen + 1, version, parent, numbers, old_numbers, script_numbers=count(1)
        )
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
            scripts = next(attempt.script_numbers)
            data = bytes_of_dense(dense)
            self._refuse(self._dense(keys=keys, args=[attempt.token, scripts, data]))
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
                    scripts,
                    attempt.number,
                    record.model_dump_json(),
                    json.dumps(attempt.numbers),
                ],
            )
        self._refuse(answer)
        self._attempt = None
        if attempt.old_numbers:
            self._wait_for_readers(record)
            with self._errors():
                self._refuse(self._retire(keys=[self._key("position")], args=[attempt.number]))
                self._remove_tables(attempt.old_numbers, attempt.number)

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
        token = fields.get(b"committed_by", b"")
        yield _RedisReading(self, committed, _Readable(committed.number, token), _numbers(fields))

    def close(self) -> None:
        """See `Sink.close`."""
        self._client.close()

    def rows(self, version: _Readable, table: int, ids: Sequence[int]) -> Sequence[bytes | None]:
        """Return what lies under the keys of rows, while a version can be read.

        Args:
            version: the version.
            table: number of the table.
            ids: of the rows.
        """
        with self._errors():
            pipeline = self._client.pipeline(transaction=False)
            for first in range(0, len(ids), _ROWS_A_LOOKUP):
                some = ids[first : first + _ROWS_A_LOOKUP]
                pipeline.mget([self._key(f"{table}:{row}") for row in some])
            # Last: no row is written over before these fields say that it may be.
            pipeline.hmget(self._key("position"), *_FIELDS_OF_READABLE)
            *rows, readable = pipeline.execute()
        self._refuse_gone(version, readable)
        return list(chain.from_iterable(rows))

    def dense_bytes(self, version: _Readable) -> bytes:
        """Return the dense layers of a version."""
        with self._errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hmget(self._key("position"), *_FIELDS_OF_READABLE)
            pipeline.get(self._key(f"dense:{version.number}"))
            readable, data = pipeline.execute()
        self._refuse_gone(version, readable)
        if data is None:
            raise SinkError(
                f"{self.url} ({self._key(f'dense:{version.number}')})",
                found="no such key",
                expected="the dense layers of the version that readers see",
                next_step="set maxmemory-policy noeviction; " + EMPTY_FIRST,
            )
        return bytes(data)

    def stored_ids(self, table: int) -> Iterator[list[int]]:
        """Yield the ids of all rows under keys of a table, some at a time; some may come twice."""
        start = len(self._key(f"{table}:").encode())
        for keys in self._stored_keys(_literal(self._key(f"{table}:")) + "*"):
            yield [int(key[start:]) for key in keys]

    def _stored_keys(self, pattern: str) -> Iterator[list[bytes]]:
        """Yield the keys that match a pattern, some at a time; some may come twice."""
        with self._errors():
            keys: list[bytes] = []
            for key in self._client.scan_iter(match=pattern, count=_KEYS_A_SCAN):
                keys.append(key)
                if len(keys) >= _KEYS_A_SCAN:
                    yield keys
                    keys = []
            if keys:
                yield keys

    def _refuse_gone(self, version: _Readable, readable: Sequence[bytes | None]) -> None:
        """Refuse a version that cannot be read any more, or that the server has lost.

        Args:
            version: the version.
            readable: values of `_FIELDS_OF_READABLE`.
        """
        number = version.number
        lowest, highest = (int(field or 0) for field in readable[:2])
        # Sinks of earlier releases do not have the token of the version before.
        token = {highest: readable[2], highest - 1: readable[3]}.get(number)
        if number > highest or (token and token != version.token):
            raise NotServing(
                self.url,
                found=f"version {number}, which the server has lost (a restart, a failover)",
                expected=f"version {highest}, which it has",
                next_step="begin another block of reading()",
            )
        if number < lowest:
            raise NotServing(
                self.url,
                found=f"version {number}, whose rows are being replaced",
                expected=f"version {lowest} or a later one",
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
                            next(attempt.script_numbers),
                            attempt.number - 1,
                            prefix,
                            row_bytes,
                            "\n".join(map(str, numbers[first:last])),
                            data[first * row_bytes : last * row_bytes],
                        ],
                        client=pipeline,
                    )
                for answer in pipeline.execute():
                    self._refuse(answer)

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
            self._remove_tables(set(range(removed, first_new)) - seen_numbers, seen)
            below = min((*seen_numbers, first_new))
            self._client.hset(self._key("position"), "removed_below", below)
            self._client.unlink(self._key(f"dense:{seen - 1}"))

    def _remove_tables(self, numbers: Collection[int], committed: int) -> None:
        """Remove tables that no version from the committed one on needs, in one scan for all."""
        if not numbers:
            return
        start = len(self._key("").encode())
        for keys in self._stored_keys(_literal(self._key("")) + "[0-9]*:*"):
            dead_keys = [key for key in keys if int(key[start:].split(b":")[0]) in numbers]
            if dead_keys:
                keys_of_script: list[bytes | str] = [self._key("position"), *dead_keys]
                self._refuse(self._remove(keys=keys_of_script, args=[committed]))

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

    def _refuse(self, answer: int) -> None:
        """Refuse to go on if a script did nothing."""
        if answer == 1:
            return
        self._attempt = None
        if answer == redis_scripts.LOST:
            raise SinkError(
                self.url,
                found="a server that has lost writes which it acknowledged (a restart, a failover)",
                expected="all rows of the version that was begun",
                next_step="publish again: the sink says where it stands",
            )
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
        self,
        sink: RedisSink,
        version: CommittedVersion,
        readable: _Readable,
        numbers: Mapping[str, int],
    ) -> None:
        self._sink, self.version, self._readable, self._numbers = sink, version, readable, numbers

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        served = table_of(self._sink.url, self.version.version, table)
        stored = self._sink.rows(self._readable, self._numbers[table], ids.tolist())
        rows = [self._seen(value, served.row_bytes) for value in stored]
        return rows_of_bytes(self._sink.url, served, ids, rows)

    def dense(self) -> dict[str, Tensor]:
        return dense_of_bytes(self._sink.dense_bytes(self._readable))

    def row_count(self, table: str) -> int:
        served = table_of(self._sink.url, self.version.version, table)
        number = self._numbers[table]
        ids: set[int] = set()
        for some in self._sink.stored_ids(number):
            stored = self._sink.rows(self._readable, number, some)
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
            next_step=EMPTY_FIRST,
        )
    return numbers


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches a text alone."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)

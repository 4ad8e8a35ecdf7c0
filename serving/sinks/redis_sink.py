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
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple

from torch import Tensor

from recpoint.catalog.store.durable import step
from recpoint.errors import NotServing, SinkError
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks import redis_scripts
from recpoint.serving.sinks.contract import Sink, SinkPosition, SinkReading, refuse_parent
from recpoint.serving.sinks.records import (
    CommittedVersion,
    SinkVersion,
    TableChange,
    parsed,
)
from recpoint.serving.sinks.redis_keys import RedisKeys
from recpoint.serving.sinks.redis_pace import RedisPace
from recpoint.serving.sinks.redis_reading import RedisReading, table_numbers
from recpoint.serving.sinks.row_bytes import bytes_of_dense, joined_bytes

__all__ = ["RedisSink"]

#: A script writes so many rows, so that readers wait for a fraction of a millisecond.
_ROWS_A_SCRIPT: Final = 128
#: Scripts that are under way at once, before a pause.
_SCRIPTS_AT_ONCE: Final = 4
#: A script removes so many keys.
_KEYS_A_REMOVAL: Final = 250


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
        keys: where they lie.
        grace_seconds: how long a version stays readable after the next one was committed. The next
            publication waits for that.
        pause: as for `RedisPace`.
    """

    def __init__(self, keys: RedisKeys, grace_seconds: float, pause: float) -> None:
        self.url = keys.url
        self._keys = keys
        self._pace = RedisPace(pause)
        self._grace_ms = round(grace_seconds * 1000)
        register = self._keys.client.register_script
        self._begin, self._put = register(redis_scripts.BEGIN), register(redis_scripts.PUT)
        self._dense, self._commit = register(redis_scripts.DENSE), register(redis_scripts.COMMIT)
        self._retire, self._remove = register(redis_scripts.RETIRE), register(redis_scripts.REMOVE)
        self._attempt: _Attempt | None = None

    def position(self) -> SinkPosition:
        """See `Sink.position`."""
        return self._position(self._keys.position())

    def begin(self, version: SinkVersion, parent: CheckpointRef | None) -> None:
        """See `Sink.begin`. Waits until the grace of the committed version's parent is over."""
        self._keys.refuse_eviction()
        fields = self._keys.position()
        position = self._position(fields)
        refuse_parent(self.url, position, version, parent)
        committed = position.committed
        seen = 0 if committed is None else committed.number
        self._wait_for_readers(committed)
        token = secrets.token_hex(16)
        new_tables = len(version.tables) if parent is None else 0
        with self._keys.errors():
            step(f"sink-begin {self.url}")
            first = self._begin(
                keys=[self._keys.key("position")],
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
        seen_numbers = table_numbers(fields)
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
        with self._keys.errors():
            step(f"sink-dense {self.url}")
            keys = [self._keys.key("position"), self._keys.key(f"dense:{attempt.number}")]
            scripts = next(attempt.script_numbers)
            data = bytes_of_dense(dense)
            self._refuse(self._dense(keys=keys, args=[attempt.token, scripts, data]))
            record = CommittedVersion(
                number=attempt.number,
                version=attempt.version,
                parent=attempt.parent,
                changes=tuple(changes),
                committed_ms=self._keys.now_ms(),
            )
            step(f"sink-commit {self.url}")
            answer = self._commit(
                keys=[self._keys.key("position")],
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
            with self._keys.errors():
                self._refuse(self._retire(keys=[self._keys.key("position")], args=[attempt.number]))
                self._remove_tables(attempt.old_numbers, attempt.number)

    def discard(self) -> None:
        """See `Sink.discard`: what was written stays until the next `begin`."""
        self._attempt = None

    @contextmanager
    def reading(self) -> Iterator[SinkReading]:
        """See `Sink.reading`."""
        fields = self._keys.position()
        committed = self._position(fields).committed
        if committed is None:
            raise NotServing(
                self.url,
                found=f"no version under the prefix {self._keys.prefix}",
                expected="a version that was published",
                next_step="recpoint publish-to SINK URL",
            )
        yield RedisReading(self._keys, committed, fields, self._grace_ms)

    def close(self) -> None:
        """See `Sink.close`."""
        self._keys.client.close()

    def _write(self, table: str, ids: Tensor, data: bytes, row_bytes: int) -> None:
        attempt = self._begun()
        keys = [self._keys.key("position")]
        prefix = self._keys.key(f"{attempt.numbers[table]}:")
        numbers = ids.tolist()
        with self._keys.errors():
            for start in range(0, len(numbers), _ROWS_A_SCRIPT * _SCRIPTS_AT_ONCE):
                step(f"sink-put {self.url}")
                pipeline = self._keys.client.pipeline(transaction=False)
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
                with self._pace.paced((row_bytes, stop - start)):
                    answers = pipeline.execute()
                for answer in answers:
                    self._refuse(answer)

    def _wait_for_readers(self, committed: CommittedVersion | None) -> None:
        """Wait until the version before the committed one need not be readable any more."""
        if committed is not None:
            wait_ms = committed.committed_ms + self._grace_ms - self._keys.now_ms()
            time.sleep(min(max(wait_ms, 0), self._grace_ms) / 1000)

    def _remove_dead(self, seen_numbers: set[int], first_new: int, seen: int) -> None:
        """Remove tables and dense layers that neither readers nor this attempt need.

        Table numbers below `first_new` were given to attempts that cannot write any more: this one
        has taken their place.
        """
        with self._keys.errors():
            removed = int(self._keys.client.hget(self._keys.key("position"), "removed_below") or 0)
            self._remove_tables(set(range(removed, first_new)) - seen_numbers, seen)
            below = min((*seen_numbers, first_new))
            self._keys.client.hset(self._keys.key("position"), "removed_below", below)
            self._keys.client.unlink(self._keys.key(f"dense:{seen - 1}"))

    def _remove_tables(self, numbers: Collection[int], committed: int) -> None:
        """Remove tables that no version from the committed one on needs, in one scan for all."""
        if not numbers:
            return
        start = len(self._keys.key("").encode())
        for keys in self._keys.stored("[0-9]*:*"):
            dead_keys = [key for key in keys if int(key[start:].split(b":")[0]) in numbers]
            for first in range(0, len(dead_keys), _KEYS_A_REMOVAL):
                some = dead_keys[first : first + _KEYS_A_REMOVAL]
                with self._pace.paced(("removal", len(some))):
                    keys_of_script = [self._keys.key("position").encode(), *some]
                    answer = self._remove(keys=keys_of_script, args=[committed])
                self._refuse(answer)

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

    def _position(self, fields: Mapping[bytes, bytes]) -> SinkPosition:
        name = f"{self.url} ({self._keys.key('position')})"
        record, in_place = fields.get(b"record"), fields.get(b"in_place")
        return SinkPosition(
            None if record is None else parsed(CommittedVersion, record, name=name),
            None if in_place is None else parsed(SinkVersion, in_place, name=name),
        )

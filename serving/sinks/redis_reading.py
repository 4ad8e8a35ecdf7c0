"""Reads one version of a sink in Redis: rows from their slots, and dense layers.

A row has one or two slots (see `redis_sink`). A reader of version N takes the slot with the highest
number up to N.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from torch import Tensor

from recpoint.errors import MalformedObject, NotServing, SinkError
from recpoint.serving.sinks.records import EMPTY_FIRST, CommittedVersion
from recpoint.serving.sinks.redis_keys import RedisKeys
from recpoint.serving.sinks.row_bytes import dense_of_bytes, rows_of_bytes, table_of

__all__ = ["RedisReading", "table_numbers"]

#: A lookup asks for so many rows at once, so that other requests wait for little.
_ROWS_A_LOOKUP: Final = 1000
#: Fields of the position that say whether a version can be read.
_FIELDS_OF_READABLE: Final = ("readable_from", "number", "committed_by", "parent_by")
_HEAD: Final = struct.Struct("<QQ")
_NUMBER: Final = (1 << 48) - 1


class RedisReading:
    """See `SinkReading`.

    Args:
        keys: of the sink.
        version: what it is.
        position: fields of the sink's position, as they were read with `version`.
        grace_ms: how long a version stays readable after the next one was committed, for errors.
    """

    def __init__(
        self,
        keys: RedisKeys,
        version: CommittedVersion,
        position: Mapping[bytes, bytes],
        grace_ms: int,
    ) -> None:
        self.version = version
        self._keys = keys
        self._token = position.get(b"committed_by", b"")
        self._numbers = table_numbers(position)
        self._grace_ms = grace_ms

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `SinkReading.lookup`."""
        served = table_of(self._keys.url, self.version.version, table)
        stored = self._rows(self._numbers[table], ids.tolist())
        rows = [self._seen(value, served.row_bytes) for value in stored]
        return rows_of_bytes(self._keys.url, served, ids, rows)

    def dense(self) -> dict[str, Tensor]:
        """See `SinkReading.dense`."""
        key = self._keys.key(f"dense:{self.version.number}")
        with self._keys.errors():
            pipeline = self._keys.client.pipeline(transaction=True)
            pipeline.hmget(self._keys.key("position"), *_FIELDS_OF_READABLE)
            pipeline.get(key)
            readable, data = pipeline.execute()
        self._refuse_gone(readable)
        if data is None:
            raise SinkError(
                f"{self._keys.url} ({key})",
                found="no such key",
                expected="the dense layers of the version that readers see",
                next_step="set maxmemory-policy noeviction; " + EMPTY_FIRST,
            )
        return dense_of_bytes(bytes(data))

    def row_count(self, table: str) -> int:
        """See `SinkReading.row_count`."""
        served = table_of(self._keys.url, self.version.version, table)
        number = self._numbers[table]
        ids: set[int] = set()
        for some in self._stored_ids(number):
            stored = self._rows(number, some)
            ids.update(
                row
                for row, value in zip(some, stored, strict=True)
                if self._seen(value, served.row_bytes) is not None
            )
        return len(ids)

    def _rows(self, table: int, ids: Sequence[int]) -> Sequence[bytes | None]:
        """Return what lies under the keys of rows of the table with a number."""
        with self._keys.errors():
            pipeline = self._keys.client.pipeline(transaction=False)
            for first in range(0, len(ids), _ROWS_A_LOOKUP):
                some = ids[first : first + _ROWS_A_LOOKUP]
                pipeline.mget([self._keys.key(f"{table}:{row}") for row in some])
            # Last: no row is written over before these fields say that it may be.
            pipeline.hmget(self._keys.key("position"), *_FIELDS_OF_READABLE)
            *rows, readable = pipeline.execute()
        self._refuse_gone(readable)
        return list(chain.from_iterable(rows))

    def _stored_ids(self, table: int) -> Iterator[list[int]]:
        """Yield the ids of all rows under keys of a table, some at a time; some may come twice."""
        start = len(self._keys.key(f"{table}:").encode())
        for keys in self._keys.stored(f"{table}:*"):
            yield [int(key[start:]) for key in keys]

    def _refuse_gone(self, readable: Sequence[bytes | None]) -> None:
        """Refuse a version that cannot be read any more, or that the server has lost.

        Args:
            readable: values of `_FIELDS_OF_READABLE`.
        """
        number = self.version.number
        lowest, highest = (int(field or 0) for field in readable[:2])
        # Sinks of earlier releases do not have the token of the version before.
        token = {highest: readable[2], highest - 1: readable[3]}.get(number)
        if number > highest or (token and token != self._token):
            raise NotServing(
                self._keys.url,
                found=f"version {number}, which the server has lost (a restart, a failover)",
                expected=f"version {highest}, which it has",
                next_step="begin another block of reading()",
            )
        if number < lowest:
            raise NotServing(
                self._keys.url,
                found=f"version {number}, whose rows are being replaced",
                expected=f"version {lowest} or a later one",
                next_step="begin another block of reading(); or give the sink a longer grace: "
                f"?grace={self._grace_ms / 1000:g} now",
            )

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


def table_numbers(position: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the numbers of tables in keys, by name, from the fields of a position.

    Raises:
        MalformedObject: the field is damaged.
    """
    data = position.get(b"numbers")
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

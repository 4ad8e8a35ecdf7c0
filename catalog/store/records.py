"""Records in a store: listed, read with all checks, created once, replaced (format §4, §6.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Literal, ParamSpec, TypeVar

from recpoint.catalog.store.contract import ObjectInfo, Store
from recpoint.catalog.store.retrying import Retries, RetryingStore
from recpoint.errors import FormatError
from recpoint.format.record_kinds import RecordKind
from recpoint.format.records import StoredRecord, pack_record

__all__ = ["Created", "Records", "parsed_twice", "read_checked"]


_Read = TypeVar("_Read")
_Parsed = TypeVar("_Parsed")
P = ParamSpec("P")
NameT = TypeVar("NameT")
RecordT = TypeVar("RecordT", bound=StoredRecord)

#: What came of creating a record. `same`: these very bytes were there, as where an earlier try of
#: this process wrote them and its answer got lost; `other`: another record was there.
Created = Literal["created", "same", "other"]

#: What it takes to know whether a record was created. A store that is away costs a second, and what
#: its own retries take.
_CREATING = Retries()


class Records(Generic[P, NameT, RecordT]):
    """The records of one kind in one run. What a key says names each.

    Args:
        store: where the run lies.
        kind: which records.
        run: the id of the run; None: whatever run and key a record belongs to, it is read.
    """

    def __init__(
        self, store: Store, kind: RecordKind[P, NameT, RecordT], *, run: str | None
    ) -> None:
        self._store = store
        self._kind = kind
        self._run = run

    def listed(self, *first: object) -> Iterator[tuple[NameT, ObjectInfo]]:
        """Name and object of each; one listing, no reads.

        Args:
            first: only those whose names begin with this.

        Raises:
            StoreError: the store cannot be listed.
        """
        for info in self._store.list(self._kind.keys.under(*first)):
            name = self._kind.keys.parse(info.key)
            if name is not None:
                yield name, info

    def names(self, *first: object) -> Iterator[NameT]:
        """As `listed`, the names alone."""
        return (name for name, _ in self.listed(*first))

    def read(self, *name: P.args, **named: P.kwargs) -> RecordT:
        """One record, fully checked.

        Raises:
            ObjectNotFound: there is none.
            FormatError: it is damaged, larger than its kind may be, of another run, or not what
                its key says.
            StoreError: it cannot be read.
        """
        return self.read_key(self._kind.keys.of(*name, **named))

    def read_key(self, key: str) -> RecordT:
        """As `read`, of the record under a key of this kind."""

        def parse(data: bytes) -> RecordT:
            return self._kind.unpack(data, key, run=self._run, url=self._store.url)

        return read_checked(self._store, key, max_bytes=self._kind.max_bytes, parse=parse)

    def create(self, record: RecordT, *name: P.args, **named: P.kwargs) -> Created:
        """Write a record if there is none.

        Raises:
            StoreError: it is still unknown after several tries, or the store refuses.
            MalformedObject: what is there is larger than any record of this kind.
            ValueError: the record is larger than any reader takes.
        """
        return self.create_packed(pack_record(record), *name, **named)

    def create_packed(self, data: bytes, *name: P.args, **named: P.kwargs) -> Created:
        """As `create`, of a record in its envelope."""
        key = self._kind.keys.of(*name, **named)
        store = RetryingStore(self._store, _CREATING)
        there = store.create_or_read(key, data, max_bytes=self._kind.max_bytes)
        return "created" if there is None else "same" if there == data else "other"

    def put(self, record: RecordT, *name: P.args, **named: P.kwargs) -> None:
        """Write a record, in the place of one that may be there.

        Raises:
            StoreError: the store refuses, or cannot be reached.
            ValueError: records of this kind are written once; or this one is too large.
        """
        key = self._kind.keys.of(*name, **named)
        if self._kind.written == "once":
            raise ValueError(f"{key} is written once")
        self._store.put(key, pack_record(record))

    def delete(self, *name: P.args, **named: P.kwargs) -> None:
        """Remove a record, if it is there.

        Raises:
            StoreError: the store refuses, or cannot be reached.
        """
        self._store.delete(self._kind.keys.of(*name, **named))


def read_checked(
    store: Store, key: str, *, max_bytes: int, parse: Callable[[bytes], _Parsed]
) -> _Parsed:
    """What `parse` makes of the object under `key`.

    A bit that flips between the store's disk and this process looks like a damaged object, and a
    damaged object makes a reader go back in time, and an agent reject a job. So bytes that do not
    parse are read a second time, and only what is wrong twice is damaged.

    Raises:
        ObjectNotFound: there is none.
        MalformedObject: it is larger than `max_bytes`.
        FormatError: what `parse` raised for the bytes of the second read.
        StoreError: it could not be read.
    """
    return parsed_twice(lambda: store.get(key, max_bytes=max_bytes), parse)


def parsed_twice(read: Callable[[], _Read], parse: Callable[[_Read], _Parsed]) -> _Parsed:
    """As `read_checked`, of whatever `read` brings."""
    try:
        return parse(read())
    except FormatError:
        pass  # and with it the first bytes go, before the second ones come
    return parse(read())

"""Lists, reads, creates and replaces records in a store, with all checks (format §4, §6.2)."""

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

#: The result of creating a record. `same`: the same bytes were there, for instance from an earlier
#: try of this process whose answer was lost; `other`: another record was there.
Created = Literal["created", "same", "other"]

#: Retries until it is known whether a record was created. A store that cannot be reached costs
#: about a second, plus the store's own retries.
_CREATING = Retries()


class Records(Generic[P, NameT, RecordT]):
    """The records of one kind in one run; each is named by the values in its key.

    Args:
        store: where the run lies.
        kind: which records.
        run: the id of the run; None: the run and the key in a record are not checked.
    """

    def __init__(
        self, store: Store, kind: RecordKind[P, NameT, RecordT], *, run: str | None
    ) -> None:
        self._store = store
        self._kind = kind
        self._run = run

    def listed(self, *first: object) -> Iterator[tuple[NameT, ObjectInfo]]:
        """Yield the name and the object of each record, with one listing and no reads.

        Args:
            first: only records whose names begin with these values.

        Raises:
            StoreError: the store cannot be listed.
        """
        for info in self._store.list(self._kind.keys.under(*first)):
            name = self._kind.keys.parse(info.key)
            if name is not None:
                yield name, info

    def names(self, *first: object) -> Iterator[NameT]:
        """As `listed`, but yield only the names."""
        return (name for name, _ in self.listed(*first))

    def read(self, *name: P.args, **named: P.kwargs) -> RecordT:
        """Return one record, fully checked.

        Raises:
            ObjectNotFound: there is no such record.
            FormatError: the record is damaged or larger than its kind may be, or it belongs to
                another run or key.
            StoreError: it cannot be read.
        """
        return self.read_key(self._kind.keys.of(*name, **named))

    def read_key(self, key: str) -> RecordT:
        """As `read`, for the record under a key of this kind."""

        def parse(data: bytes) -> RecordT:
            return self._kind.unpack(data, key, run=self._run, url=self._store.url)

        return read_checked(self._store, key, max_bytes=self._kind.max_bytes, parse=parse)

    def create(self, record: RecordT, *name: P.args, **named: P.kwargs) -> Created:
        """Write a record if there is none.

        Raises:
            StoreError: after several tries it is still unknown whether the record was written, or
                the store refuses.
            MalformedObject: an object is there that is larger than any record of this kind.
            ValueError: the record is larger than a reader accepts.
        """
        return self.create_packed(pack_record(record), *name, **named)

    def create_packed(self, data: bytes, *name: P.args, **named: P.kwargs) -> Created:
        """As `create`, for a record that is already packed in its envelope."""
        key = self._kind.keys.of(*name, **named)
        store = RetryingStore(self._store, _CREATING)
        stored = store.create_or_read(key, data, max_bytes=self._kind.max_bytes)
        return "created" if stored is None else "same" if stored == data else "other"

    def put(self, record: RecordT, *name: P.args, **named: P.kwargs) -> None:
        """Write a record, replacing any record under its key.

        Raises:
            StoreError: the store refuses, or cannot be reached.
            ValueError: records of this kind are written once, or this record is too large.
        """
        key = self._kind.keys.of(*name, **named)
        if self._kind.written == "once":
            raise ValueError(f"{key} must not be replaced: records of its kind are written once")
        self._store.put(key, pack_record(record))

    def delete(self, *name: P.args, **named: P.kwargs) -> None:
        """Remove a record if it is there.

        Raises:
            StoreError: the store refuses, or cannot be reached.
        """
        self._store.delete(self._kind.keys.of(*name, **named))


def read_checked(
    store: Store, key: str, *, max_bytes: int, parse: Callable[[bytes], _Parsed]
) -> _Parsed:
    """Read the object under `key` and return what `parse` makes of its bytes.

    If `parse` refuses the bytes, the object is read a second time, and only a second refusal counts
    as damage. Without this, a bit that flips between the store's disk and this process would make
    a reader restore an older checkpoint, or an agent reject a job.

    Raises:
        ObjectNotFound: there is no such object.
        MalformedObject: the object is larger than `max_bytes`.
        FormatError: `parse` raised it for the bytes of the second read.
        StoreError: the object could not be read.
    """
    return parsed_twice(lambda: store.get(key, max_bytes=max_bytes), parse)


def parsed_twice(read: Callable[[], _Read], parse: Callable[[_Read], _Parsed]) -> _Parsed:
    """As `read_checked`, for whatever `read` returns."""
    try:
        return parse(read())
    except FormatError:
        pass  # the exception and the first bytes are freed before the second read
    return parse(read())

"""Reading an object that has to parse; what was only damaged on its way is read once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import FormatError

__all__ = ["parsed_twice", "read_checked"]

_Read = TypeVar("_Read")
_Parsed = TypeVar("_Parsed")


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

"""Removes many objects of a store that may go in any order, several requests at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.scheduler import ReadScheduler

__all__ = ["delete_objects", "deletions"]

#: Most requests at once.
_AT_ONCE: Final = 8

#: Objects that one thread removes, in one request where the store has such requests.
_OBJECTS_EACH: Final = 1_000


def _always() -> bool:
    return True


def delete_objects(store: Store, keys: Sequence[str]) -> None:
    """Remove the objects in any order; see `deletions`."""
    for _ in deletions(store, keys):
        pass


def deletions(
    store: Store, keys: Sequence[str], *, may_begin: Callable[[], bool] = _always
) -> Iterator[str]:
    """Remove the objects in any order; yield the key of each one once it is gone.

    What must go first must be gone before this is called for the others: requests overtake each
    other, and one request removes its objects in no order. All requests are over when this ends.
    Nothing is removed before the first key is asked for.

    Args:
        store: where they are.
        keys: of the objects, each once; one that is not there counts as gone.
        may_begin: asked right before each request, from any thread; after a False no more begin,
            and the objects that are left stay.

    Raises:
        StoreError: an object could not be removed. Others may be gone that were not yielded.
    """
    shares = [keys[first : first + _OBJECTS_EACH] for first in range(0, len(keys), _OBJECTS_EACH)]
    if len(shares) <= 1:
        yield from _removed(store, keys, may_begin)
        return
    with ReadScheduler(_AT_ONCE, name="recpoint-delete") as threads:
        for removed in threads.results(
            shares, lambda share: list(_removed(store, share, may_begin))
        ):
            yield from removed


def _removed(store: Store, keys: Sequence[str], may_begin: Callable[[], bool]) -> Iterator[str]:
    requests, remaining_count = store.delete_many(keys), len(keys)
    while remaining_count and may_begin():
        removed = next(requests)
        remaining_count -= len(removed)
        yield from removed

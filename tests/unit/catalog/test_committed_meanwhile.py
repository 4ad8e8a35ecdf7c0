"""A checkpoint that is committed while somebody looks at a run is not taken for superseded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.interposed_store import InterposedStore
from tests.retained_run import add, filled, planned


def dropped(run: Run) -> set[int]:
    return {one.manifest.name.step for one in planned(run).retention.dropped}


def called_superseded(run: Run) -> set[int]:
    found = check(run)
    assert found.ok and all(health.live for health in found.checkpoints)
    return {int(one.key[10:22]) for one in found.findings if one.text == "superseded"}


def superseded(run: Run) -> set[int]:
    return {name.step for name in run.superseded()}


class Meanwhile:
    """A run of which another checkpoint is committed right before listing number `before`."""

    def __init__(self, place: Path, before: int) -> None:
        self.run = filled(open_store(str(place)))
        self.before = before
        self.listings = 0

    def seen(self) -> Run:
        """The run as somebody sees it meanwhile."""
        return Run.open(InterposedStore(self.run.store, before=self._commit))

    def _commit(self, call: str, key: str) -> None:
        if call == "list":
            self.listings += 1
            if self.listings == self.before:
                add(self.run, 60, self.run.manifest(50, 1))


@pytest.mark.parametrize(
    ("look", "expected"),
    [(dropped, {10, 20, 30}), (called_superseded, set()), (superseded, set())],
)
def test_before_whichever_listing_it_is_committed(
    tmp_path: Path, look: Callable[[Run], set[int]], expected: set[int]
) -> None:
    for number in itertools.count(1):
        meanwhile = Meanwhile(tmp_path / str(number), before=number)
        assert look(meanwhile.seen()) == expected, number
        if meanwhile.listings < number:
            break
    assert number > 2

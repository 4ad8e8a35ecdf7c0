"""A signal's handler that raises, at each place of a call of ours, harms no checkpoint.

`make test` takes a fixed sample of the places; `make nightly` all of them, and the first visit
of each once more in a process that is killed with SIGKILL afterwards (`RUNS.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.fault.interrupted_lives import CALLS, Life, compare, killed_life
from tests.fault.kill_points import FAULTS_EVERY, ended
from tests.forked import ForkedProcess
from tests.interrupted import Arrival, arrivals
from tests.stored_run import StoredRun
from tests.training_builder import Place

#: Of how many places `make test` takes one.
_EVERY = {"step": 149, "batch": 59, "restore": 1021, "close": 251}
#: Of `make nightly`: so many tests share the places of a call, since each waits for its agent most
#: of the time.
_PARTS = 4 if FAULTS_EVERY else 1
#: Chains grow with each checkpoint, and are read for each.
_STEPS_A_LIFE = 20


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Place]:
    """Places of their own, one after another."""
    return (
        Place(str(tmp_path / f"run-{number}"), tmp_path / f"staging-{number}")
        for number in itertools.count()
    )


def _arrivals(call: str, place: Place, stored: StoredRun) -> list[Arrival]:
    """Where the call can be interrupted."""
    if call == "restore":
        stored.copy_to(place.run)
    with place.agent():
        life = Life(place, call)
        life.begin(call)
        visits = life.interrupted(call, None)
        life.go_on(call)
        life.ckpt.close()
    # A `no_grad` of ours that is interrupted where it begins must not leave gradients off.
    always = "grad_mode.py" if call == "restore" else ""
    found = arrivals(visits, every=FAULTS_EVERY or _EVERY[call], always=always)
    assert len(visits.counts) > 300
    return found


@pytest.fixture
def stored(places: Iterator[Place]) -> StoredRun:
    """A run with a chain."""
    place = next(places)
    with place.agent():
        life = Life(place, "restore")
        life.ckpt.restore()
        for _ in range(3):
            life.until_stored()
        life.ckpt.close()
    return StoredRun(Run.open(open_store(place.run)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's generators
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("call", ["step", "batch"])
def test_steps_that_are_interrupted(
    places: Iterator[Place], stored: StoredRun, call: str, part: int
) -> None:
    wanted = left = _arrivals(call, next(places), stored)[part::_PARTS]
    arrived = 0
    while left:
        some, left = left[:_STEPS_A_LIFE], left[_STEPS_A_LIFE:]
        place = next(places)
        with place.agent():
            life = Life(place, call)
            life.begin(call)
            for arrival in some:
                arrived += life.interrupted(call, arrival).arrived
                life.until_stored()
                compare(place, life.truth)
                if call == "step":
                    life.batch()
            life.ckpt.close()
    assert arrived > len(wanted) // 2  # waiting may be over sooner than where it was looked at


@pytest.mark.slow
# Python closes a file that is open when a handler raises, with a warning. It drops what is raised
# where it throws a generator away, or tells a weak collection that an object is gone.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(_io|generator object|function Weak):"
    "pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("call", ["restore", "close"])
def test_starts_and_ends_that_are_interrupted(
    places: Iterator[Place], stored: StoredRun, call: str, part: int
) -> None:
    wanted = _arrivals(call, next(places), stored)[part::_PARTS]
    arrived = 0
    for arrival in wanted:
        place = next(places)
        if call == "restore":
            stored.copy_to(place.run)
        with place.agent():
            life = Life(place, call)
            life.begin(call)
            arrived += life.interrupted(call, arrival).arrived
            life.go_on(call)
            compare(place, life.truth)
            life.ckpt.close()
        assert torch.is_grad_enabled()
        with place.agent():  # its lock is free, and it restores
            after = Life(place, call)
            assert after.ckpt.restore() is not None
            assert after.ckpt.batches_done == max(life.truth)
            after.ckpt.close()
    assert arrived > len(wanted) // 2


@pytest.mark.skipif(not FAULTS_EVERY, reason="make nightly")
@pytest.mark.parametrize("call", CALLS)
def test_each_place_with_a_kill_afterwards(
    tmp_path: Path, places: Iterator[Place], stored: StoredRun, call: str
) -> None:
    def one(arrival: Arrival, place: Place) -> None:
        if call == "restore":
            stored.copy_to(place.run)
        truth = Path(place.run + ".truth")
        process = ForkedProcess(target=killed_life, args=(place, call, arrival, truth))
        process.start()
        assert ended(process) == -9, arrival
        compare(place, torch.load(truth))

    first = [one for one in _arrivals(call, next(places), stored) if one.visit == 1]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, {arrival.spot: arrival for arrival in first}.values(), places))

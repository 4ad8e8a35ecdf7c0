"""Whatever the system answers to the training thread, training goes on, and a checkpoint is whole.

A place from which training asks the operating system for something fails once, in a training of its
own. `make test` takes a third of the places; `make nightly` takes all of them.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore
from tests.fault.kill_points import FAULTS_EVERY
from tests.training_builder import Place, checkpointer, simple_training

_OF_OS = (
    "access close fstat fsync ftruncate getcwd link listdir lstat mkdir open posix_fallocate pread "
    "preadv pwrite read rename replace rmdir scandir stat statvfs unlink write"
)
_CALLS: list[tuple[Any, str]] = [(os, name) for name in _OF_OS.split()]
_CALLS += [(fcntl, "flock"), (io, "open"), (mmap, "mmap")]

#: A call, and the lines that led to it.
Site = tuple[str, tuple[tuple[str, int], ...]]


class System:
    """The calls of one thread to the system, of which those from one place fail.

    Attributes:
        sites: from where it was called, in order, each once.
        failed: how often it failed.
    """

    def __init__(self, failing: Site | None) -> None:
        self._failing = failing
        self._thread = threading.current_thread()
        self.sites: dict[Site, None] = {}
        self.failed = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in _CALLS:
                patch.setattr(module, name, self._call(name, getattr(module, name)))
            yield

    def _call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not self._thread:
                return real(*arguments, **named)
            site = (name, _callers())
            self.sites[site] = None
            if site != self._failing:
                return real(*arguments, **named)
            if name == "close":
                real(*arguments)  # whatever close says, it is closed
            self.failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return call


def _callers() -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(2)  # of who called the one that asks
    while frame is not None and len(found) < 4:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def train_and_close(place: Place, system: System, *, agent: bool, **settings: Any) -> None:
    """Three batches and a checkpoint of each, with the system watched in our own calls alone."""
    training = simple_training()
    weights = {}
    ckpt = checkpointer(
        training,
        place,
        interval_batches=1,
        close_seconds=0.5,
        busy_wait_seconds=0.2,
        **settings,
    )
    with place.agent() if agent else nullcontext():
        ckpt.restore()
        for batch in range(1, 4):
            training.batch()
            weights[batch] = training.model.users.weight.detach().clone()
            with system.watched():
                ckpt.step()
        with system.watched():
            ckpt.checkpoint()
            _ = ckpt.stats
            ckpt.close()
    place.persist_all()
    target = MemoryTarget()
    try:
        found = restore(Run.open(open_store(place.run)), target).restored.step
    except NothingToRestore:
        assert ckpt.stats.failed, "a checkpoint is there, or it was counted that there is none"
    else:
        assert torch.equal(target.tables["users"].values, weights[found])


@pytest.mark.parametrize(
    ("first", "settings"),
    [
        (0, {"agent": True}),
        (1, {"agent": True, "when_busy": "cancel"}),
        (2, {"agent": False, "jobs": 3}),
    ],
    ids=["skips", "cancels", "has no agent"],
)
def test_every_call_to_the_system_may_fail(
    tmp_path: Path, first: int, settings: dict[str, Any]
) -> None:
    """By day, the settings begin with different places."""
    healthy = System(None)
    train_and_close(Place(str(tmp_path / "run"), tmp_path / "staging"), healthy, **settings)
    assert len(healthy.sites) >= 9
    sites = list(healthy.sites)
    chosen = sites[::FAULTS_EVERY] if FAULTS_EVERY else sites[first::3]
    reached = 0
    for number, site in enumerate(chosen):
        place = Place(str(tmp_path / f"run-{number}"), tmp_path / f"staging-{number}")
        failing = System(site)
        train_and_close(place, failing, **settings)
        reached += failing.failed > 0
    # Where an agent is quick or slow, not all calls are made each time.
    assert reached >= len(chosen) // 2

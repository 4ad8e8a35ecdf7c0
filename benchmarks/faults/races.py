"""Faults of two processes at once: two writers, and a retention beside other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import LIMIT_SECONDS, Act, Ended
from benchmarks.faults.io_faults import CHANGES, READS, Cause, IoFault
from benchmarks.faults.system import Place, System, normal
from benchmarks.faults.trials import Trials, restore, save, spread
from benchmarks.faults.verdicts import Outcome, Verdict, worst

__all__ = [
    "retention_in_a_consolidation",
    "retention_in_a_restore",
    "retention_in_a_save",
    "two_writers",
]

_ONE, _TWO, _THREE = normal()[:1], normal()[:2], normal()[:3]
_FIRST, _SECOND = (1, 201), (1, 202)
#: Of two writers at once, so many pairs.
_ROUNDS = 4


def two_writers(trials: Trials) -> Verdict:
    """Two trainers go on from step 1, and both save a step 2 of their own.

    One after the other, then at once. The state that is restored must be one of the two, whole; and
    the writer of the other must have been told that it is not stored.
    """
    verdicts = [_pair(trials, at_once=False)]
    verdicts += [_pair(trials, at_once=True) for _ in range(_ROUNDS)]
    return worst(verdicts)


def _pair(trials: Trials, *, at_once: bool) -> Verdict:
    place = trials.prepared(_ONE)
    first = _writer(trials, place, "first", _FIRST, after=None if at_once else "second-done")
    second = _writer(trials, place, "second", _SECOND, after=None)
    ends = {_FIRST: first.ended(), _SECOND: second.ended()}
    restored = trials.restored(place)
    verdict = trials.judge(restored, newest=[_FIRST, _SECOND], names=trials.names(place, 2))
    if not restored.ok or verdict.outcome is not Outcome.SURVIVED:
        failed_saves = [tags for tags, ended in ends.items() if not ended.ok]
        if len(failed_saves) == 2:  # both know that they stored nothing
            return trials.judge(restored, newest=[_ONE], names=trials.names(place, 1, 2))
        if not restored.ok:
            return Verdict(Outcome.SILENT, f"a save returns success, the restore: {restored}"[:300])
        return verdict
    for tags, ended in ends.items():
        if ended.ok and restored.value[1] != trials.digest(tags):
            how = "at once" if at_once else "one after the other"
            return Verdict(Outcome.SILENT, f"{how}: both saves return success, one state is gone")
    return verdict


def _writer(trials: Trials, place: Place, name: str, tags: Any, *, after: str | None) -> Act:
    """Begin a trainer that is ready before either saves, and that saves when `after` is there."""

    def act(system: System) -> None:
        with system.trainer() as trainer:
            (place.folder / f"{name}-ready").touch()
            for writer_name in ("first", "second"):
                _wait(place.folder / f"{writer_name}-ready")
            if after is not None:
                _wait(place.folder / after)
            try:
                trainer.save(tags)
            finally:
                (place.folder / f"{name}-done").touch()

    act_of = trials.begin(_host(place, name), act)
    if name == "first":
        _wait(place.folder / "first-ready", act_of)
    return act_of


def _host(place: Place, name: str) -> Place:
    """Return the place as another host sees it: the same store, a staging area of its own."""
    return _OtherHost(place.folder, place.url, name)


@dataclass(frozen=True)
class _OtherHost(Place):
    host: str = ""

    @property
    def staging(self) -> Path:
        """Return the staging area of that host."""
        return self.folder / f"staging-{self.host}"


def _wait(path: Path, act: Act | None = None) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS / 2
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def _keep_one(system: System) -> None:
    """Save step 3 and keep one: by the save itself, or by a call after it."""
    save(system, _THREE, keep=1)


def retention_in_a_save(trials: Trials) -> Verdict:
    """A retention that keeps one checkpoint, at each file operation of a save.

    Where a save deletes by itself, it is killed before each of its file operations. Else the save
    is stopped before each, a retention runs to its end in another process, and the save goes on.
    """
    place = trials.prepared(_ONE, _TWO)
    does = _keep_one
    verdicts = []
    for operation in spread(trials.operations(place, does), trials.places):
        trials.put_back(place)
        if trials.kind.retention == "save":
            fault = IoFault(cause=Cause.KILL_GROUP, at=operation, kinds=CHANGES, below=place.folder)
            saved = trials.perform(place, does, fault=fault)
        else:
            fault = IoFault(cause=Cause.STOP, at=operation, kinds=CHANGES, below=place.store)
            saved = _beside(trials, place, does, fault, lambda system: system.retain(1))
        restored = trials.restored(place)
        newest = [_THREE] if saved.ok else [_TWO, _THREE]
        names = trials.names(place, 2, 3)
        verdicts.append(trials.judge(restored, newest=newest, names=names, acknowledged=saved.ok))
    return worst(verdicts)


def retention_in_a_restore(trials: Trials) -> Verdict:
    """A restore is stopped before each of its reads, and what it reads is deleted meanwhile.

    It began when step 2 was the newest; then step 3 is saved, and only that is kept. Step 2 and
    step 3 are both right.
    """
    place = trials.prepared(_ONE, _TWO)

    def newer(system: System) -> None:
        save(system, _THREE, keep=1)
        if system.retention == "call":
            system.retain(1)

    verdicts = []
    kinds = READS
    for operation in spread(trials.operations(place, restore, kinds=kinds), trials.places):
        trials.put_back(place)
        fault = IoFault(cause=Cause.STOP, at=operation, kinds=kinds, below=place.store)
        restored = _beside(trials, place, restore, fault, newer)
        names = trials.names(place, 1, 2, 3)
        verdicts.append(trials.judge(restored, newest=[_TWO, _THREE], names=names))
    return worst(verdicts)


def retention_in_a_consolidation(trials: Trials) -> Verdict:
    """A consolidation is stopped before each file operation, and a retention runs meanwhile."""
    place = trials.prepared(_ONE, _TWO, _THREE)

    def consolidate(system: System) -> None:
        system.consolidate()

    verdicts = []
    for operation in spread(trials.operations(place, consolidate), trials.places):
        trials.put_back(place)
        fault = IoFault(cause=Cause.STOP, at=operation, kinds=CHANGES, below=place.store)
        _beside(trials, place, consolidate, fault, lambda system: system.retain(1))
        restored = trials.restored(place)
        names = trials.names(place, 1, 2, 3)
        verdicts.append(trials.judge(restored, newest=[_THREE], names=names, acknowledged=True))
    return worst(verdicts)


def _beside(
    trials: Trials,
    place: Place,
    does: Callable[[System], Any],
    fault: IoFault,
    meanwhile: Callable[[System], Any],
) -> Ended:
    """Begin an act that stops where `fault` says, do another to its end, let it go on."""
    act = trials.begin(place, does, fault=fault)
    if act.stopped():
        trials.perform(_host(place, "beside"), meanwhile)
        act.go_on()
    return act.ended()

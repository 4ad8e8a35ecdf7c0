"""What trials of a fault are made of: places with saved states, acts of a system, verdicts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import Act, Ended, begin, perform
from benchmarks.faults.io_faults import Cause, IoFault
from benchmarks.faults.system import Begin, Place, System, Tags, digest, normal, truth
from benchmarks.faults.verdicts import Outcome, Verdict, judge

__all__ = ["Broken", "Trials", "spread"]


class Broken(Exception):
    """A system could not do without a fault what a trial needs; the text says what it said."""


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 1 to `count`, evenly spread, the last among them."""
    if count <= most or not most:
        return list(range(1, count + 1))
    return sorted({1 + round(k * (count - 1) / (most - 1)) for k in range(most)})


class Trials:
    """The trials of one system.

    Args:
        system: its class.
        folder: for all places.
        places: of so many places at most where a fault could strike, one each is tried; 0: all.
    """

    def __init__(self, system: type[System], folder: Path, *, places: int) -> None:
        self.kind = system
        self.places = places
        self._folder = folder
        self._number = 0
        self._prepared: dict[tuple[Tags, ...], Place] = {}
        self._digests: dict[Tags, str] = {}

    def empty(self) -> Place:
        """Return a new place."""
        self._number += 1
        folder = self._folder / f"place-{self._number}"
        for name in ("store", "staging"):
            (folder / name).mkdir(parents=True)
        return Place(folder)

    def prepared(self, *states: Tags) -> Place:
        """Return a new place in which one process has saved these states, in order.

        Raises:
            Broken: the system did not save them.
        """
        if states not in self._prepared:
            place = self.empty()
            ended = self.perform(place, lambda system: save(system, *states))
            if not ended.ok:
                raise Broken(f"a save without a fault: {ended}\n{ended.output}")
            self._prepared[states] = place
        # Some systems store absolute names: a trial runs where the states were saved.
        return self._copy(self._prepared[states])

    def _copy(self, place: Place) -> Place:
        self._number += 1
        copy = self._folder / f"kept-{place.folder.name}"
        if not copy.exists():
            shutil.copytree(place.folder, copy, symlinks=True)
        shutil.rmtree(place.folder)
        shutil.copytree(copy, place.folder, symlinks=True)
        return place

    def put_back(self, place: Place) -> None:
        """Put a prepared place back as it was."""
        self._copy(place)

    def begin(
        self,
        place: Place,
        does: Callable[[System], Any],
        *,
        environment: Mapping[str, str] | None = None,
        threaded: bool = False,
        worker: bool = False,
        **how: Any,
    ) -> Act:
        """Begin an act of the system in a place; `how` as for `Act`."""

        def act() -> Any:
            import torch

            torch.set_num_threads(1)
            os.environ.update(environment or {})
            return does(self.kind(place, threaded=threaded, worker=worker))

        return begin(act, place.folder, **how)

    def perform(self, place: Place, does: Callable[[System], Any], **how: Any) -> Ended:
        """Do an act to its end; see `begin`."""
        return self.begin(place, does, **how).ended()

    def restored(self, place: Place, **how: Any) -> Ended:
        """Restore the newest state in a process; its value is (step, digest)."""
        return self.perform(place, restore, **how)

    def operations(self, place: Place, does: Callable[[System], Any], **how: Any) -> int:
        """Return how many file operations below the store an act does, and put the place back."""
        kinds = how.pop("kinds", 1)
        count = IoFault(cause=Cause.COUNT, kinds=kinds, below=place.folder)
        ended = self.perform(place, does, fault=count, **how)
        if not ended.ok:
            raise Broken(f"an act without a fault: {ended}\n{ended.output}")
        self.put_back(place)
        return ended.operations

    def digest(self, tags: Tags) -> str:
        """Return the digest of a state."""
        if tags not in self._digests:
            ended = perform(lambda: digest(truth(tags)), self._folder)
            if not ended.ok:
                raise RuntimeError(f"no truth: {ended}")
            self._digests[tags] = ended.value
        return self._digests[tags]

    def judge(
        self,
        restored: Ended,
        *,
        newest: Sequence[Tags],
        names: Iterable[str],
        acknowledged: bool = False,
        earlier: Sequence[Tags] = (),
    ) -> Verdict:
        """Judge a restore; see `verdicts.judge`. `earlier`: states of an earlier run."""
        other_states = {
            self.digest(normal()[:step]): f"the state of step {step}" for step in range(9)
        }
        other_states |= {self.digest(tags): "a state of the earlier run" for tags in earlier}
        return judge(
            restored,
            newest=[self.digest(tags) for tags in newest],
            other_states=other_states,
            names=names,
            acknowledged=acknowledged,
        )

    def names(self, place: Place, *steps: int) -> list[str]:
        """Return what an error may call the checkpoints of these steps."""
        system = self.kind(place)
        return [name for step in steps for name in system.names(step)]


def save(system: System, *states: Tags, start: Begin = "newest", **how: Any) -> None:
    """Save states in one life of a trainer."""
    with system.trainer(start, **how) as trainer:
        for tags in states:
            trainer.save(tags)


def restore(system: System) -> tuple[int, str]:
    """Restore the newest state; return its step and digest."""
    step, tensors = system.restore()
    return step, digest(tensors)


def not_applicable(reason: str) -> Verdict:
    """Return the verdict for a system without such a part."""
    return Verdict(Outcome.NOT_APPLICABLE, reason)

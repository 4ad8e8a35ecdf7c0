"""Which checkpoints of a run count: the live line (format §5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Self

from recpoint.errors import GenerationRecordLost, MalformedObject
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CONSOLIDATED_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    ConsolidatedName,
    ManifestName,
)
from recpoint.format.record_kinds import CONSOLIDATED, GENERATION, MANIFEST, RecordKind
from recpoint.format.records import GenerationRecord

__all__ = [
    "Representation",
    "by_checkpoint",
    "first_of_line",
    "live_line",
    "next_step_of_lost",
    "restarts",
]


def next_step_of_lost(generation: int, *, never_committed: bool = False) -> str:
    """What a person can do about a generation record that is not there, for errors.

    Args:
        generation: whose record it is.
        never_committed: nothing in the store names that generation.
    """
    said = " --never-committed" if never_committed else ""
    return (
        "put it back from a backup; or say from where that trainer went on: recpoint relink URL "
        f"{generation}{said} --step STEP, or --from-nothing"
    )


class Representation(NamedTuple):
    """One manifest that a checkpoint can be restored by: its own, or a consolidated one.

    `after` is the step of a consolidated increment's parent; None for the other forms.
    """

    name: ManifestName
    form: Literal["own", "full", "after"] = "own"
    after: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Which representation of its checkpoint a manifest is, by what it says."""
        name = ManifestName(manifest.step, manifest.generation)
        if manifest.stands_for is None:
            return cls(name)
        if manifest.parent is None:
            return cls(name, "full")
        return cls(name, "after", manifest.parent.step)

    def __str__(self) -> str:
        if self.form == "own":
            return str(self.name)
        what = "into a full" if self.after is None else f"after step {self.after}"
        return f"{self.name}, consolidated {what}"

    @property
    def kind(self) -> RecordKind[..., ManifestName | ConsolidatedName, Manifest]:
        """Of which kind of record the manifest is."""
        return MANIFEST if self.form == "own" else CONSOLIDATED

    @property
    def key(self) -> str:
        """Where the manifest is stored."""
        if self.form == "own":
            return MANIFEST_KEY.of(*self.name)
        return CONSOLIDATED_KEY.of(*self.name, self.after)

    @property
    def cost(self) -> tuple[int, int]:
        """Sorts the representations of one checkpoint: reading least first (format §6.3)."""
        return ("full", "after", "own").index(self.form), self.after or 0


def by_checkpoint(found: Iterable[Representation]) -> dict[ManifestName, list[Representation]]:
    """Representations by checkpoint, ascending; of each those that read least first."""
    by_name: dict[ManifestName, list[Representation]] = {}
    for one in sorted(found, key=lambda one: (one.name, one.cost)):
        by_name.setdefault(one.name, []).append(one)
    return by_name


def live_line(
    newest: int, generations: Mapping[int, GenerationRecord], names: Iterable[ManifestName]
) -> list[ManifestName]:
    """The checkpoints that count, newest first; steps descend strictly.

    Nothing here reads a clock or the store: the answer is a function of the generation records
    and of the keys that exist.

    Args:
        newest: the highest generation there is a record or a checkpoint of, readable or not; 0
            when there is none.
        generations: the records by number; those the walk does not come past may be absent.
        names: every checkpoint there is, in any order.

    Raises:
        GenerationRecordLost: the walk comes to a generation whose record is not in `generations`.
        MalformedObject: a record that goes on from its own or from a later generation.
    """
    steps: dict[int, list[int]] = {}
    for name in names:
        steps.setdefault(name.generation, []).append(name.step)
    line: list[ManifestName] = []
    generation = newest
    below: int | None = None  # steps of older generations count up to here, exclusively
    while generation > 0:
        record = generations.get(generation)
        if record is None:
            raise GenerationRecordLost(
                GENERATION_KEY.of(generation),
                found=f"no generation record{_of(generation, steps)}",
                expected="the record of each generation that the live line goes through: without "
                "it nobody knows which checkpoints count",
                next_step=next_step_of_lost(generation),
            )
        restored = record.restored
        # A trainer only counts upwards from what it restored: whatever claims otherwise is not
        # its work on this line.
        floor = restored.step if restored else 0
        for step in sorted(steps.get(generation, ()), reverse=True):
            if step >= floor and (below is None or step < below):
                line.append(ManifestName(step, generation))
                below = step
        if restored is None:
            break
        if restored.generation >= generation:
            raise MalformedObject(
                GENERATION_KEY.of(generation),
                found=f"generation {generation} going on from generation {restored.generation}",
                expected="an earlier generation",
                next_step=GENERATION.when_damaged(GENERATION_KEY.of(generation)),
            )
        # Up to the restored step itself, unless the newer generation has one of that step.
        below = min(restored.step + 1, below) if below is not None else restored.step + 1
        generation = restored.generation
    return line


def _of(generation: int, steps: Mapping[int, list[int]]) -> str:
    """How many checkpoints of a generation there are, for errors."""
    there = steps.get(generation)
    if not there:
        return ""
    count = "1 checkpoint" if len(there) == 1 else f"{len(there)} checkpoints"
    return f", but {count} of generation {generation}, the newest of step {max(there)}"


def restarts(newest: int, generations: Mapping[int, GenerationRecord]) -> int:
    """Starts of trainers since the first on the line that `newest` is on, that one left out.

    Those whose work was lost are counted too, and those whose record cannot be read: each was a
    restart.

    Args:
        newest: a generation.
        generations: the records by number; those that cannot be read are absent.
    """
    return newest - first_of_line(newest, generations)


def first_of_line(newest: int, generations: Mapping[int, GenerationRecord]) -> int:
    """The generation that the line of `newest` began with, as far as records can be read."""
    first = newest
    while (record := generations.get(first)) is not None and record.restored is not None:
        if record.restored.generation >= first:
            break
        first = record.restored.generation
    return first

"""Finds the checkpoints of a run that count: the live line (format §5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Self

from recpoint.errors import GenerationRecordLost, MalformedObject
from recpoint.format.manifest import ManifestHead
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
    """Return what a person can do about a missing generation record, for errors.

    Args:
        generation: the generation without a record.
        never_committed: nothing in the store names that generation.
    """
    option = " --never-committed" if never_committed else ""
    return (
        "put it back from a backup; or say which checkpoint that trainer restored: recpoint relink "
        f"URL {generation}{option} --step STEP, or --from-nothing"
    )


class Representation(NamedTuple):
    """A manifest that can restore a checkpoint: the checkpoint's own, or a consolidated one.

    `after` is the step of a consolidated increment's parent; None for the other forms.
    """

    name: ManifestName
    form: Literal["own", "full", "after"] = "own"
    after: int | None = None

    @classmethod
    def of(cls, manifest: ManifestHead) -> Self:
        """Return the representation that `manifest` is, by its contents."""
        name = ManifestName(manifest.step, manifest.generation)
        if manifest.stands_for is None:
            return cls(name)
        if manifest.parent is None:
            return cls(name, "full")
        return cls(name, "after", manifest.parent.step)

    def __str__(self) -> str:
        if self.form == "own":
            return str(self.name)
        target_text = "into a full" if self.after is None else f"after step {self.after}"
        return f"{self.name}, consolidated {target_text}"

    @property
    def kind(self) -> RecordKind[..., ManifestName | ConsolidatedName, ManifestHead]:
        """The manifest's kind of record."""
        return MANIFEST if self.form == "own" else CONSOLIDATED

    @property
    def key(self) -> str:
        """The manifest's key."""
        if self.form == "own":
            return MANIFEST_KEY.of(*self.name)
        return CONSOLIDATED_KEY.of(*self.name, self.after)

    @property
    def cost(self) -> tuple[int, int]:
        """Sort the representations of one checkpoint, cheapest to restore first (format §6.3)."""
        return ("full", "after", "own").index(self.form), self.after or 0


def by_checkpoint(found: Iterable[Representation]) -> dict[ManifestName, list[Representation]]:
    """Group representations by checkpoint, ascending; in each group the cheapest comes first."""
    by_name: dict[ManifestName, list[Representation]] = {}
    for representation in sorted(
        found, key=lambda representation: (representation.name, representation.cost)
    ):
        by_name.setdefault(representation.name, []).append(representation)
    return by_name


def live_line(
    newest: int, generations: Mapping[int, GenerationRecord], names: Iterable[ManifestName]
) -> list[ManifestName]:
    """Return the checkpoints that count, newest first; steps descend strictly.

    This reads no clock and no store: the result depends only on the generation records and the
    existing keys.

    Args:
        newest: the highest generation that has a record, readable or not, or a checkpoint; 0 if
            there is none.
        generations: the records by number; records that the walk does not reach may be absent.
        names: every checkpoint of the run, in any order.

    Raises:
        GenerationRecordLost: the walk reaches a generation whose record is not in `generations`.
        MalformedObject: a record names a restored checkpoint of its own or a later generation.
    """
    steps: dict[int, list[int]] = {}
    for name in names:
        steps.setdefault(name.generation, []).append(name.step)
    line: list[ManifestName] = []
    generation = newest
    below: int | None = None  # steps of older generations count if they are lower than this
    while generation > 0:
        record = generations.get(generation)
        if record is None:
            raise GenerationRecordLost(
                GENERATION_KEY.of(generation),
                found=f"no generation record{_of(generation, steps)}",
                expected="the record of each generation on the live line; without it nobody knows "
                "which checkpoints count",
                next_step=next_step_of_lost(generation),
            )
        restored = record.restored
        # A trainer counts upwards from the step that it restored; a checkpoint of a lower step
        # is not its work on this line.
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
                found=f"generation {generation}, which restored generation {restored.generation}",
                expected="a restored checkpoint of an earlier generation",
                next_step=GENERATION.when_damaged(GENERATION_KEY.of(generation)),
            )
        # Includes the restored step itself, unless the newer generation has a checkpoint of it.
        below = min(restored.step + 1, below) if below is not None else restored.step + 1
        generation = restored.generation
    return line


def _of(generation: int, steps: Mapping[int, list[int]]) -> str:
    """Return the number of checkpoints of a generation, in words, for errors."""
    steps_of = steps.get(generation)
    if not steps_of:
        return ""
    count = "1 checkpoint" if len(steps_of) == 1 else f"{len(steps_of)} checkpoints"
    return f", but {count} of generation {generation}, the newest of step {max(steps_of)}"


def restarts(newest: int, generations: Mapping[int, GenerationRecord]) -> int:
    """Return how many trainers were started after the first one of the line of `newest`.

    Trainers whose work was lost, and those whose record cannot be read, count too: each was a
    restart.

    Args:
        newest: a generation.
        generations: the records by number; unreadable records are absent.
    """
    return newest - first_of_line(newest, generations)


def first_of_line(newest: int, generations: Mapping[int, GenerationRecord]) -> int:
    """Return the first generation of the line of `newest`, as far as records can be read."""
    first = newest
    while (record := generations.get(first)) is not None and record.restored is not None:
        if record.restored.generation >= first:
            break
        first = record.restored.generation
    return first

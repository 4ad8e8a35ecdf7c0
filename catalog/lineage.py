"""Which checkpoints of a run count: the live line (format §5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recpoint.errors import MalformedObject, MissingLink
from recpoint.format.naming import generation_key
from recpoint.format.records import GenerationRecord

__all__ = ["LINEAGE_NEXT_STEP", "ManifestName", "live_line"]

#: What a person can do when the lineage cannot be followed, for errors.
LINEAGE_NEXT_STEP = (
    "put the object back from a backup, or name the checkpoint to go on from, by step and "
    "generation: recpoint restore URL --step STEP --generation GENERATION"
)


class ManifestName(NamedTuple):
    """What a manifest's key says: at which step, and which trainer wrote it."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation})"


def live_line(
    newest: int, generations: Mapping[int, GenerationRecord], names: Iterable[ManifestName]
) -> list[ManifestName]:
    """The checkpoints that count, newest first; steps descend strictly.

    Nothing here reads a clock or the store: the answer is a function of the generation records
    and of the keys that exist.

    Args:
        newest: the highest generation there is a record of, readable or not; 0 when there is none.
        generations: the records by number; those the walk does not come past may be absent.
        names: every manifest there is, in any order.

    Raises:
        MissingLink: the walk comes to a generation whose record is not in `generations`.
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
            raise MissingLink(
                generation_key(generation),
                found="no generation record",
                expected="the record of each generation that the live line goes through",
                next_step=LINEAGE_NEXT_STEP,
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
                generation_key(generation),
                found=f"generation {generation} going on from generation {restored.generation}",
                expected="an earlier generation",
                next_step=LINEAGE_NEXT_STEP,
            )
        # Up to the restored step itself, unless the newer generation has one of that step.
        below = min(restored.step + 1, below) if below is not None else restored.step + 1
        generation = restored.generation
    return line

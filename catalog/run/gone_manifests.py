"""Finds out whether a run's manifests are all gone: moved away, or not copied yet (format §6.5).

A run whose first checkpoint was never committed has no manifest either, and its chunks are
orphans. Two signs show that there were manifests. The first is an object that is written only
after a manifest. The second is chunks of a second checkpoint of the newest trainer: an agent
stores its jobs one after another, so the first checkpoint was committed, unless it was rejected
or waits for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.rejections import RejectionWatch
from recpoint.catalog.run.run import Run
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    CONSOLIDATED_KEY,
    EXPIRED_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    METRIC_KEY,
    PIN_KEY,
    PUBLICATION_KEY,
    VALIDATION_KEY,
    AttemptName,
    ManifestName,
    generation_in_key,
    parse_chunk_key,
)
from recpoint.format.record_kinds import PART

__all__ = [
    "why_gone",
]


#: Prefixes under which nothing is written before the first manifest.
_AFTER_THE_FIRST: Final = (
    CONSOLIDATED_KEY.prefix,
    VALIDATION_KEY.prefix,
    PUBLICATION_KEY.prefix,
    PIN_KEY.prefix,
    METRIC_KEY.prefix,
    EXPIRED_KEY.prefix,
)


def why_gone(run: Run, there: Mapping[ManifestName, Sequence[Representation]]) -> str:
    """Return a sign that the run had manifests, if no checkpoint has its own now; else empty.

    Costs nothing if a checkpoint has its own manifest; retention never deletes the own manifest of
    the newest checkpoint (format §6.6).

    Args:
        run: the run.
        there: the result of `Run.representations`.

    Raises:
        StoreError: the store cannot be read.
    """
    if any(one.form == "own" for one in chain.from_iterable(there.values())):
        return ""
    sign = next(_signs(run), "")
    return sign and f"{sign}, and nothing is under {MANIFEST_KEY.prefix} any more"


def _signs(run: Run) -> Iterator[str]:
    for prefix in _AFTER_THE_FIRST:
        for info in run.store.list(prefix):
            if generation_in_key(info.key) or PUBLICATION_KEY.parse(info.key):
                yield f"{info.key} is there"
    for number in run.generation_numbers():
        key = GENERATION_KEY.of(number)
        try:
            restored = run.generation(number).restored
        except ObjectNotFound:
            continue
        except FormatError:
            yield f"{key} cannot be read, and may go on from a checkpoint"
            continue
        if restored is not None:
            yield f"{key} goes on from step {restored.step} (generation {restored.generation})"
    yield from _followed(run)


def _followed(run: Run) -> Iterator[str]:
    """Yield a sign if an agent has stored chunks of two checkpoints of the newest generation.

    Chunks of earlier generations are no sign: their trainers were replaced, so the agent may have
    stored chunks of a checkpoint that could not be committed.
    """
    generation = max(run.generation_numbers(), default=0)
    stored: set[AttemptName] = set()
    for info in run.store.list(CHUNKS_PREFIX):
        attempt = parse_chunk_key(info.key)
        if attempt is not None and attempt.generation >= generation:
            stored.add(attempt)
    if len(stored) < 2:
        return
    for part in run.records(PART).names():
        stored.discard(part.checkpoint)
    for of_rank in RejectionWatch(run).refresh():
        refs = [one.checkpoint for one in of_rank.newest]
        stored.difference_update(AttemptName(ref.step, ref.generation, ref.attempt) for ref in refs)
        if of_rank.count > len(refs) and all(ref.generation >= generation for ref in refs):
            # The record has only the newest rejections; earlier checkpoints may be rejected too.
            first = min(ref.step for ref in refs)
            stored = {attempt for attempt in stored if attempt.step > first}
    steps = sorted({attempt.step for attempt in stored})
    if len(steps) > 1:
        yield (
            f"chunks of {len(steps)} checkpoints of the newest generation are there, of steps "
            f"{steps[0]} … {steps[-1]}"
        )

"""Whether all manifests are gone of a run that had some: moved away, or not copied yet (§6.5).

A run whose first checkpoint was never committed has no manifest either, and what is there of it are
orphans. What tells the two apart is written only once there is a manifest; or it is chunks of a
second checkpoint of the newest trainer, since an agent stores its jobs one after another: what was
stored of the first was committed, unless it was rejected, or waits for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.rejections import RejectionWatch
from recpoint.catalog.runs.run import Run
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

__all__ = ["why_gone"]

#: Where nothing is before the first manifest.
_AFTER_THE_FIRST: Final = (
    CONSOLIDATED_KEY.prefix,
    VALIDATION_KEY.prefix,
    PUBLICATION_KEY.prefix,
    PIN_KEY.prefix,
    METRIC_KEY.prefix,
    EXPIRED_KEY.prefix,
)


def why_gone(run: Run, there: Mapping[ManifestName, Sequence[Representation]]) -> str:
    """What says that there were manifests, where no checkpoint has its own; else empty.

    Costs nothing where there is one: retention leaves the newest checkpoint its own (format §6.6).

    Args:
        run: the run.
        there: of `Run.representations`.

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
    """The newest generation, if an agent has stored of a later step after one of it.

    What is of an earlier one alone may have been stored in vain: its trainer had been replaced.
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
            # Those before them may have been rejected, too.
            first = min(ref.step for ref in refs)
            stored = {attempt for attempt in stored if attempt.step > first}
    steps = sorted({attempt.step for attempt in stored})
    if len(steps) > 1:
        yield (
            f"chunks of {len(steps)} checkpoints of the newest generation are there, of steps "
            f"{steps[0]} … {steps[-1]}"
        )

"""The past of a trainer, from what it goes on from and from what it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from recpoint.catalog.restoring.restore import RestoreReport
from recpoint.catalog.runs.lineage import first_of_line
from recpoint.catalog.runs.run import Run
from recpoint.errors import FormatError, ObjectNotFound, RecpointError
from recpoint.format.history import MAX_COUNT, ChosenPrecision, History
from recpoint.format.records import GenerationRecord
from recpoint.trainer_plugin.failures import Past

__all__ = ["left_behind", "past_of", "with_left_behind"]

_log = logging.getLogger("recpoint")


def past_of(history: History, report: RestoreReport, *, restarts: int) -> Past:
    """The past of a trainer that goes on from a checkpoint with this history."""
    return Past(
        trained_ms=history.trained_ms,
        restarts=restarts,
        lossy_restores=min(history.lossy_restores + report.quantized, MAX_COUNT),
        precision=history.precision,
    )


def with_left_behind(past: Past, decision: ChosenPrecision | None) -> Past:
    """The same job with what the trainers left behind had decided, if they had fallen back.

    A fall-back is for the rest of the job: going back to an earlier state does not undo it.
    """
    if decision is None or not decision.fallen_back:
        return past
    return replace(past, precision=decision)


def left_behind(run: Run, record: GenerationRecord) -> ChosenPrecision | None:
    """What was decided by the newest trainer between `record` and the one it goes on from.

    None: there is none, it had no table under the rule, or what it stored cannot be read, which
    fails nobody's start. One manifest tells: all of a generation say the same of a fall-back, and
    each generation takes over what is told of those before it. Those that began from nothing in
    between were another job's. What the restored checkpoint itself says needs no look.

    Args:
        run: that was claimed.
        record: of this trainer's generation.
    """
    restored = record.restored
    if restored is None or record.generation - restored.generation == 1:
        return None
    try:
        between = [
            name
            for name in run.manifest_names()
            if restored.generation < name.generation < record.generation
        ]
        if between:
            others = _begun_anew(run, restored.generation, {name.generation for name in between})
            between = [name for name in between if name.generation not in others]
        for name in sorted(between, key=lambda name: (name.generation, name.step), reverse=True):
            try:
                return run.manifest(*name).history.precision
            except (FormatError, ObjectNotFound) as error:
                _log.warning("%s is left behind, and cannot be read: %s", name, error)
    except RecpointError as error:
        _log.warning("what is left behind of the run cannot be read: %s", error)
    return None


def _begun_anew(run: Run, restored: int, numbers: Collection[int]) -> set[int]:
    """Which generations of `numbers` are on a line that surely began later than that of `restored`.

    Where a record cannot be read, nobody knows, and what was decided there counts.
    """
    known = {
        number: record
        for number, record in run.read_generations(run.generation_numbers()).items()
        if isinstance(record, GenerationRecord)
    }
    job = first_of_line(restored, known)
    firsts = {number: first_of_line(number, known) for number in numbers}
    return {
        number
        for number, first in firsts.items()
        if first != job and first in known and known[first].restored is None
    }

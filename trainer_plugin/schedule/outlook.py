"""Estimates how many restores a job has to expect, and from that widths and the interval.

How many bits a stored value gets, from the number of restores that a job has to expect. Each
restore from quantized rows costs accuracy once, so the width follows from the number of restores;
the thresholds come from Check-N-Run (NSDI 2022). Past restores count too, because their loss of
accuracy stays in the model.

What a trainer expects of the rest of its job, and the widths and interval that follow. Used by the
training thread only. Each decision is logged when it changes, and shown in `stats`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.run.lineage import first_of_line
from recpoint.catalog.run.run import Run
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import FormatError, ObjectNotFound, RecpointError, SettingsError
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import MAX_COUNT, ChosenPrecision, History, RuleBits
from recpoint.format.records import GenerationRecord
from recpoint.trainer_plugin.loss_setting import Loss
from recpoint.trainer_plugin.schedule import schedule
from recpoint.trainer_plugin.schedule.ledger import Statistics
from recpoint.trainer_plugin.schedule.schedule import Interval
from recpoint.trainer_plugin.settings import (
    MS_PER_HOUR,
    Bits,
    ExpectedFailures,
    Past,
    Precision,
    failure_rate,
    hours_left,
)

__all__ = [
    "Outlook",
    "bits_for",
    "decide",
    "in_bits",
    "keys_by_loss",
    "left_behind",
    "past_of",
    "table_widths",
    "with_left_behind",
]


_log = logging.getLogger("recpoint")


def past_of(history: History, report: RestoreReport, *, restarts: int) -> Past:
    """Return the past of a trainer that restored a checkpoint with this history.

    Args:
        history: history in the checkpoint.
        report: report of the restore.
        restarts: starts of trainers on the line after the first start, including this one.
    """
    return Past(
        trained_ms=history.trained_ms,
        restarts=restarts,
        lossy_restores=min(history.lossy_restores + report.quantized, MAX_COUNT),
        precision=history.precision,
    )


def with_left_behind(past: Past, decision: ChosenPrecision | None) -> Past:
    """Return the past with the decision of trainers left behind, if they had fallen back.

    A fall-back holds for the rest of the job: going back to an earlier state does not undo it.
    """
    if decision is None or not decision.fallen_back:
        return past
    return replace(past, precision=decision)


def left_behind(run: Run, record: GenerationRecord) -> ChosenPrecision | None:
    """Return the precision that the newest trainer left behind had chosen.

    Trainers left behind are those between this trainer and the one whose checkpoint it restored.
    One manifest is enough: all manifests of a generation say the same about a fall-back, and each
    generation takes over the fall-back of earlier ones. Generations that started from nothing
    belong to another job and do not count.

    Args:
        run: the run that was claimed.
        record: record of this trainer's generation.

    Returns:
        The precision; None: no trainer was left behind, it had no table under the rule, or its
        manifests cannot be read, which must not stop a start.
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
            anew = _begun_anew(run, restored.generation, {name.generation for name in between})
            between = [name for name in between if name.generation not in anew]
        for name in sorted(between, key=lambda name: (name.generation, name.step), reverse=True):
            try:
                return run.manifest(*name).history.precision
            except (FormatError, ObjectNotFound) as error:
                _log.warning("%s is left behind, and cannot be read: %s", name, error)
    except RecpointError as error:
        _log.warning("checkpoints left behind cannot be read: %s", error)
    return None


def _begun_anew(run: Run, restored: int, numbers: Collection[int]) -> set[int]:
    """Return the generations of `numbers` that are surely on another line than `restored`.

    Such a line began from nothing. If a record cannot be read, its generation is not returned, so
    its decision counts.
    """
    records = {
        number: record
        for number, record in run.read_generations(run.generation_numbers()).items()
        if isinstance(record, GenerationRecord)
    }
    job = first_of_line(restored, records)
    firsts = {number: first_of_line(number, records) for number in numbers}
    return {
        number
        for number, first in firsts.items()
        if first != job and first in records and records[first].restored is None
    }


#: (the most restores, the width that suffices for them).
_RULE: tuple[tuple[int, RuleBits], ...] = ((1, 2), (3, 3), (20, 4))
_WIDEST: RuleBits = 8

#: If a past alone predicts more restores than this, it is too short to predict anything.
_MOST_FROM_PAST = 1_000

_MOST_EXPECTED = 10**9

#: Bits of a stored value; None: the rule chooses them for each checkpoint.
Width = int | None


def bits_for(expected_milli: int | None) -> RuleBits:
    """Return the width for a number of expected restores, in thousandths; None: unknown."""
    if expected_milli is not None:
        for most, bits in _RULE:
            if expected_milli <= 1_000 * most:
                return bits
    return _WIDEST


def decide(expected: ExpectedFailures | None, past: Past, *, trained_ms: int) -> ChosenPrecision:
    """Decide the width of a checkpoint.

    The expected number of restores is: restores from quantized rows so far, plus failure rate x
    hours left. Once there were more restores than the whole job was expected to have, the job falls
    back to 8 bits for the rest of it. The fall-back depends only on settings and past, so all
    checkpoints of one trainer agree on it. `expected_milli` of the result is the largest number
    expected on this line so far.

    Args:
        expected: the user's setting.
        past: what happened before this trainer's start.
        trained_ms: training time so far, including this trainer's, in milliseconds.
    """
    previous = past.precision
    if previous is not None and previous.fallen_back:
        return previous
    whole = _expected_of_the_whole(expected, past)
    if whole is not None and 1_000 * past.lossy_restores > whole.milli:
        return ChosenPrecision(
            bits=_WIDEST,
            expected_milli=whole.milli,
            fallen_back=True,
            reason=f"{past.lossy_restores} restores from quantized rows, {whole.milli / 1000:.3g} "
            f"were expected {whole.of}: {_WIDEST} bits for the rest of the job",
        )
    most = None if previous is None else previous.expected_milli
    hours_to_come = hours_left(expected, trained_ms=trained_ms)
    if hours_to_come is None:
        assert (
            expected is not None and expected.job_hours is not None
        )  # otherwise `hours_to_come` is set
        reason = f"the job has trained for longer than the {expected.job_hours:g} h that were given"
        return _unknown(reason, most)
    rate = failure_rate(expected, past, trained_ms=trained_ms)
    to_come = rate.per_hour * hours_to_come
    is_user_rate = expected is not None and expected.per_node_hour is not None
    if not is_user_rate and to_come > _MOST_FROM_PAST:
        reason = "no failure rate was given, and the job's past is too short to estimate one"
        return _unknown(reason, most)
    milli = _milli(min(past.lossy_restores + to_come, _MOST_EXPECTED))
    return ChosenPrecision(
        bits=bits_for(milli),
        expected_milli=max(milli, most or 0),
        fallen_back=False,
        reason=f"{milli / 1000:.3g} restores expected: {past.lossy_restores} from quantized rows "
        f"so far, and {rate.per_hour:.3g} an hour ({rate.source}) in the next {hours_to_come:.3g} "
        "h",
    )


class _Whole(NamedTuple):
    """The restores that a whole job was expected to have.

    Attributes:
        milli: their number, in thousandths.
        of: what the number refers to, for messages.
    """

    milli: int
    of: str


def _expected_of_the_whole(expected: ExpectedFailures | None, past: Past) -> _Whole | None:
    """Return the number with which a job's restores are compared; None if there is none.

    If the user gave a rate, it is rate x all hours, including past hours. (The number for the hours
    left shrinks as they pass, and a job that has exactly the expected restores must not exceed it.)
    Otherwise, it is the largest number recorded on the line.
    """
    if expected is not None and expected.per_node_hour is not None:
        hours = expected.job_hours
        if hours is None:
            hours_to_come = hours_left(expected, trained_ms=past.trained_ms)
            assert hours_to_come is not None  # None only if `job_hours` is given and exceeded
            hours = past.trained_ms / MS_PER_HOUR + hours_to_come
        restores = expected.per_node_hour * expected.nodes * hours
        return _Whole(_milli(min(restores, _MOST_EXPECTED)), f"in {hours:.3g} h")
    if past.precision is not None and past.precision.expected_milli is not None:
        return _Whole(past.precision.expected_milli, "at most, as checkpoints record")
    return None


def _milli(restores: float) -> int:
    # Rounded first, so that rounding errors do not raise a whole number to the next one.
    return math.ceil(round(1_000 * restores, 6))


def _unknown(reason: str, most_milli: int | None) -> ChosenPrecision:
    return ChosenPrecision(
        bits=_WIDEST, expected_milli=most_milli, fallen_back=False, reason=reason
    )


def in_bits(width: Width, precision: ChosenPrecision | None) -> int:
    """Return the bits in which a table of this width is stored.

    Args:
        width: width of the table; None: the rule decides.
        precision: decision of the rule; None: there is none.
    """
    if width is not None:
        return width
    return _WIDEST if precision is None else precision.bits


def table_widths(
    tables: Sequence[Table],
    precision: Precision,
    *,
    names: Collection[str] | None = None,
) -> dict[str, Width]:
    """Return `Table.key` -> width; the width of the table's dtype means that it is stored exactly.

    Args:
        tables: the tables that this process stores.
        precision: the user's setting.
        names: names of the tables of the whole job; None: `tables` is complete.

    Raises:
        SettingsError: `Precision.tables` names a table that does not exist or is not trained.
    """
    table_by_name = {table.name: table for table in tables}
    for name in precision.tables:
        if name not in table_by_name and names is not None and name in names:
            continue  # another rank stores it
        if name not in table_by_name:
            raise SettingsError(
                f"Precision.tables[{name!r}]",
                found="no such table",
                expected=f"one of {sorted(table_by_name)!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        if not table_by_name[name].changes:
            raise SettingsError(
                f"Precision.tables[{name!r}]",
                found="a table that is not trained (requires_grad=False)",
                expected="a table whose rows change",
                next_step="remove it from Precision.tables: it is stored exactly, in fulls only",
            )
    return {table.key: _width(table, _own_bits(table, precision)) for table in tables}


def keys_by_loss(tables: Sequence[Table], precision: Precision) -> frozenset[str]:
    """Return the keys of the tables whose rows get widths by a loss.

    Args:
        tables: the tables that this process stores.
        precision: the user's setting.
    """
    return frozenset(
        table.key
        for table in tables
        if table.changes and isinstance(_own_bits(table, precision), Loss)
    )


def _own_bits(table: Table, precision: Precision) -> Bits | Loss:
    own_bits = precision.tables.get(table.name)
    if own_bits is not None:
        return own_bits
    # Size of the whole table, so that all its pieces have one width, however it is cut.
    dim = table.dim if table.columns is None else table.columns.of
    small = table.table_rows * dim <= precision.small_table_values
    return "lossless" if small else precision.bits


def _width(table: Table, bits: Bits | Loss) -> Width:
    # A frozen table is stored exactly: it is stored seldom, and training cannot correct a rounding.
    if bits == "lossless" or not table.changes:
        return 8 * item_bytes(table.dtype)
    if isinstance(bits, Loss):
        return _WIDEST  # until a price of a bit is known
    return None if bits == "auto" else bits


#: An interval is logged only if it differs by more than this share from the one logged last.
_TOLD_SHARE = 0.2


class Outlook:
    """Decides widths and interval of one trainer, from its start on.

    Args:
        expected: the user's setting.
        past: what happened before this trainer's start.
        rule: whether the rule of expected restores decides the width of any table.
        statistics: source of measured costs; decisions are recorded here.
    """

    def __init__(
        self,
        expected: ExpectedFailures | None,
        past: Past,
        *,
        rule: bool,
        statistics: Statistics,
    ) -> None:
        self._expected = expected
        self._past = past
        self._rule = rule
        self._statistics = statistics
        self._started = time.monotonic()
        self._told_interval: float | None = None

    @property
    def trained_ms(self) -> int:
        """Training time that the state holds, in milliseconds; it never shrinks."""
        own_ms = int(1_000 * (time.monotonic() - self._started))
        # Limited to what the format allows, because the past is read from a store.
        return min(self._past.trained_ms + own_ms, MAX_COUNT)

    def history(
        self,
        *,
        interval_seconds: float | Literal["auto"] | None = None,
        interval_batches: int | None = None,
    ) -> History:
        """Return the history of a checkpoint that is cut now, and decide its width.

        Args:
            interval_seconds: the setting; the history says when the next checkpoint is due.
            interval_batches: the setting, if batches are counted.
        """
        trained_ms = self.trained_ms
        due_seconds = None if interval_seconds == "auto" else interval_seconds
        if interval_seconds == "auto" and self._statistics.stall_seconds is not None:
            due_seconds = self.interval_seconds()  # unknown before the first stall is measured
        return History(
            due_ms=None if due_seconds is None else min(round(1_000 * due_seconds), MAX_COUNT),
            due_batches=interval_batches,
            trained_ms=trained_ms,
            lossy_restores=self._past.lossy_restores,
            precision=self._decide(trained_ms) if self._rule else None,
        )

    def _decide(self, trained_ms: int) -> ChosenPrecision:
        decision = decide(self._expected, self._past, trained_ms=trained_ms)
        last_precision = self._statistics.precision
        if last_precision is None or (last_precision.bits, last_precision.fallen_back) != (
            decision.bits,
            decision.fallen_back,
        ):
            level = logging.WARNING if decision.fallen_back else logging.INFO
            _log.log(level, 'bits="auto": %d bits: %s', decision.bits, decision.reason)
        self._statistics.precision = decision
        return decision

    def interval_seconds(self) -> float:
        """Return the interval that suits the costs measured so far, in seconds."""
        rate = failure_rate(
            self._expected,
            self._past,
            trained_ms=self.trained_ms,
            assumed_hours=schedule.ASSUMED_HOURS,
        )
        decision = schedule.choose(
            rate,
            stall_seconds=self._statistics.stall_seconds,
            persist_seconds=self._statistics.persist_seconds,
        )
        self._tell(decision)
        self._statistics.interval = decision
        return decision.seconds

    def _tell(self, decision: Interval) -> None:
        last_seconds = self._told_interval
        if (
            last_seconds is None
            or abs(decision.seconds - last_seconds) > _TOLD_SHARE * last_seconds
        ):
            _log.info('interval_seconds="auto": %.3g s: %s', decision.seconds, decision.reason)
            self._told_interval = decision.seconds

"""Estimates the restores that a job has to expect; widths and the interval follow from them."""

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
from recpoint.embeddings.tables import Table
from recpoint.errors import FormatError, ObjectNotFound, RecpointError, SettingsError
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import MAX_COUNT, ChosenPrecision, History, RuleBits
from recpoint.format.records import GenerationRecord
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
    "left_behind",
    "past_of",
    "table_widths",
    "with_left_behind",
]


# The past of a trainer, from what it goes on from and from what it leaves behind.


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


# How many bits a stored value gets, from the restores that a job has to expect. Pure decisions.
#
# Each restore from quantized rows costs accuracy once, so the width follows from how many there
# will be; the thresholds are those of Check-N-Run (NSDI 2022). Restores of the past count too: what
# they have cost stays in the model.


#: Restores that a width is good for.
_RULE: tuple[tuple[int, RuleBits], ...] = ((1, 2), (3, 3), (20, 4))
_WIDEST: RuleBits = 8

#: More than this from a past alone says no more than that there is hardly any past.
_MOST_FROM_PAST = 1_000

_MOST_EXPECTED = 10**9

#: Bits of a stored value; None: as the rule says for each checkpoint.
Width = int | None


def bits_for(expected_milli: int | None) -> RuleBits:
    """The width for so many thousandths of a restore; None: nobody knows how many."""
    if expected_milli is not None:
        for most, bits in _RULE:
            if expected_milli <= 1_000 * most:
                return bits
    return _WIDEST


def decide(expected: ExpectedFailures | None, past: Past, *, trained_ms: int) -> ChosenPrecision:
    """The width of a checkpoint.

    Restores expected: those from quantized rows so far, and failure rate x hours left. Once there
    were more of them than the whole job was expected to have, the rest of it has 8 bits: that
    depends on settings and past alone, so that all checkpoints of one trainer say the same.
    `expected_milli` of the decision is the most that was expected on this line so far.

    Args:
        expected: what was said of the job's failures.
        past: what came before this trainer.
        trained_ms: training so far, this trainer's included.
    """
    before = past.precision
    if before is not None and before.fallen_back:
        return before
    whole = _expected_of_the_whole(expected, past)
    if whole is not None and 1_000 * past.lossy_restores > whole.milli:
        return ChosenPrecision(
            bits=_WIDEST,
            expected_milli=whole.milli,
            fallen_back=True,
            reason=f"{past.lossy_restores} restores from quantized rows, {whole.milli / 1000:.3g} "
            f"were expected {whole.of}: {_WIDEST} bits for the rest of the job",
        )
    most = None if before is None else before.expected_milli
    left = hours_left(expected, trained_ms=trained_ms)
    if left is None:
        assert expected is not None and expected.job_hours is not None  # else there is time left
        why = f"the job goes on for longer than the {expected.job_hours:g} h it was said"
        return _unknown(why, most)
    rate = failure_rate(expected, past, trained_ms=trained_ms)
    to_come = rate.per_hour * left
    said = expected is not None and expected.per_node_hour is not None
    if not said and to_come > _MOST_FROM_PAST:
        why = "no failure rate was given, and the job's past is too short to tell one"
        return _unknown(why, most)
    milli = _milli(min(past.lossy_restores + to_come, _MOST_EXPECTED))
    return ChosenPrecision(
        bits=bits_for(milli),
        expected_milli=max(milli, most or 0),
        fallen_back=False,
        reason=f"{milli / 1000:.3g} restores expected: {past.lossy_restores} from quantized rows "
        f"so far, and {rate.per_hour:.3g} an hour ({rate.source}) in the next {left:.3g} h",
    )


class _Whole(NamedTuple):
    """Restores expected of a whole job, in thousandths; and of what they were, for people."""

    milli: int
    of: str


def _expected_of_the_whole(expected: ExpectedFailures | None, past: Past) -> _Whole | None:
    """What the restores of a job are compared with; None when nobody has expected a number.

    With a rate that was given: rate x all hours, those of the past too. What is expected of the
    hours left alone shrinks as they pass, and a job that has the restores it was said to have is
    not beyond its estimate. Else the most that was recorded on the line.
    """
    if expected is not None and expected.per_node_hour is not None:
        hours = expected.job_hours
        if hours is None:
            left = hours_left(expected, trained_ms=past.trained_ms)
            assert left is not None  # there is no length to be beyond
            hours = past.trained_ms / MS_PER_HOUR + left
        restores = expected.per_node_hour * expected.nodes * hours
        return _Whole(_milli(min(restores, _MOST_EXPECTED)), f"of {hours:.3g} h")
    if past.precision is not None and past.precision.expected_milli is not None:
        return _Whole(past.precision.expected_milli, "at most by what was recorded")
    return None


def _milli(restores: float) -> int:
    # What is a whole number but for rounding errors stays one.
    return math.ceil(round(1_000 * restores, 6))


def _unknown(reason: str, most_milli: int | None) -> ChosenPrecision:
    return ChosenPrecision(
        bits=_WIDEST, expected_milli=most_milli, fallen_back=False, reason=reason
    )


def in_bits(width: Width, precision: ChosenPrecision | None) -> int:
    """The bits that a table of this width is stored in."""
    if width is not None:
        return width
    return _WIDEST if precision is None else precision.bits


def table_widths(
    tables: Sequence[Table],
    precision: Precision,
    *,
    names: Collection[str] | None = None,
) -> dict[str, Width]:
    """`Table.key` -> its width; the dtype's own: stored exactly.

    Args:
        tables: that this process stores.
        precision: as it was set.
        names: of the tables of the whole job; None: `tables` are all.

    Raises:
        SettingsError: `Precision.tables` names a table that there is not, or that is not trained.
    """
    known = {table.name: table for table in tables}
    for name in precision.tables:
        if name not in known and names is not None and name in names:
            continue  # another rank's
        if name not in known:
            raise SettingsError(
                f"Precision.tables[{name!r}]",
                found="no such table",
                expected=f"one of {sorted(known)!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        if not known[name].changes:
            raise SettingsError(
                f"Precision.tables[{name!r}]",
                found="a table that is not trained (requires_grad=False)",
                expected="a table whose rows change",
                next_step="take it out of Precision.tables: it is stored once, in fulls",
            )
    widths = {}
    for table in tables:
        own = precision.tables.get(table.name)
        # Of the whole table: its pieces, by rows or columns, have one width, however it is cut.
        dim = table.dim if table.columns is None else table.columns.of
        if own is None:
            small = table.table_rows * dim <= precision.small_table_values
            own = "lossless" if small else precision.bits
        widths[table.key] = _width(table, own)
    return widths


def _width(table: Table, wanted: Bits) -> Width:
    # A frozen table is stored seldom and cannot recover from a rounding: keep its bytes.
    if wanted == "lossless" or not table.changes:
        return 8 * item_bytes(table.dtype)
    return None if wanted == "auto" else wanted


# What a trainer expects of the rest of its job, and what follows: widths and the interval.
#
# Kept by the training thread only. Each decision is logged when it changes, and shown in `stats`.


#: An interval that differs by less than this share from the one told last is not told again.
_TOLD_SHARE = 0.2


class Outlook:
    """The outlook of one trainer, from its start on.

    Args:
        expected: what was said of the job's failures.
        past: what came before this trainer.
        rule: whether any table is under the rule of expected restores.
        statistics: measured costs come from it, and decisions are shown in it.
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
        """Training that the state holds; it only grows, whatever the clocks of hosts say."""
        here = int(1_000 * (time.monotonic() - self._started))
        return min(self._past.trained_ms + here, MAX_COUNT)  # the store says what came before

    def history(
        self,
        *,
        interval_seconds: float | Literal["auto"] | None = None,
        interval_batches: int | None = None,
    ) -> History:
        """What a checkpoint that is cut now has been through, its width decided.

        Args:
            interval_seconds: as it was set; what it comes to is when people expect the next one.
            interval_batches: the same where batches are counted.
        """
        trained_ms = self.trained_ms
        due_seconds = None if interval_seconds == "auto" else interval_seconds
        if interval_seconds == "auto" and self._statistics.stall_seconds is not None:
            due_seconds = self.interval_seconds()  # else the first one measures it
        return History(
            due_ms=None if due_seconds is None else min(round(1_000 * due_seconds), MAX_COUNT),
            due_batches=interval_batches,
            trained_ms=trained_ms,
            lossy_restores=self._past.lossy_restores,
            precision=self._decide(trained_ms) if self._rule else None,
        )

    def _decide(self, trained_ms: int) -> ChosenPrecision:
        decision = decide(self._expected, self._past, trained_ms=trained_ms)
        told = self._statistics.precision
        if told is None or (told.bits, told.fallen_back) != (decision.bits, decision.fallen_back):
            level = logging.WARNING if decision.fallen_back else logging.INFO
            _log.log(level, 'bits="auto": %d bits: %s', decision.bits, decision.reason)
        self._statistics.precision = decision
        return decision

    def interval_seconds(self) -> float:
        """The interval that suits what has been measured so far."""
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
        told = self._told_interval
        if told is None or abs(decision.seconds - told) > _TOLD_SHARE * told:
            _log.info('interval_seconds="auto": %.3g s: %s', decision.seconds, decision.reason)
            self._told_interval = decision.seconds

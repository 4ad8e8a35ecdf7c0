"""How many bits a stored value gets, from the restores that a job has to expect. Pure decisions.

Each restore from quantized rows costs accuracy once, so the width follows from how many there will
be; the thresholds are those of Check-N-Run (NSDI 2022). Restores of the past count too: what they
have cost stays in the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from recpoint.embeddings.tables import Table
from recpoint.errors import SettingsError
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import ChosenPrecision, RuleBits
from recpoint.trainer_plugin.failures import (
    MS_PER_HOUR,
    ExpectedFailures,
    Past,
    failure_rate,
    hours_left,
)
from recpoint.trainer_plugin.settings import Bits, Precision

__all__ = ["Width", "bits_for", "decide", "in_bits", "table_widths"]

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

"""Which width a checkpoint gets, and which tables are under the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from recpoint.embeddings.tables.tables import ModuleTable, Table
from recpoint.errors import SettingsError
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import Columns
from recpoint.trainer_plugin.schedule.outlook import bits_for, decide, in_bits, table_widths
from recpoint.trainer_plugin.settings import Bits, ExpectedFailures, Past, Precision
from recpoint.trainer_plugin.tables import find_tables

HOUR_MS = 3_600_000
WEEK_MS = 7 * 24 * HOUR_MS


def chosen(bits: Any, expected_milli: int | None, *, fallen_back: bool = False) -> ChosenPrecision:
    return ChosenPrecision(
        bits=bits, expected_milli=expected_milli, fallen_back=fallen_back, reason="as before"
    )


@pytest.mark.parametrize(
    ("milli", "bits"),
    [
        (0, 2),
        (1_000, 2),
        (1_001, 3),
        (3_000, 3),
        (3_001, 4),
        (20_000, 4),
        (20_001, 8),
        (10**12, 8),
        (None, 8),
    ],
)
def test_the_rule(milli: int | None, bits: int) -> None:
    assert bits_for(milli) == bits


def job(per_node_hour: float, nodes: int, hours: float | None) -> ExpectedFailures:
    return ExpectedFailures(per_node_hour=per_node_hour, nodes=nodes, job_hours=hours)


@pytest.mark.parametrize(
    ("expected", "trained_hours", "restores", "milli", "bits"),
    [
        (job(0.001, 10, 100), 0, 0, 1_000, 2),  # 0.001 failures x 10 nodes x 100 h
        (job(0.001, 30, 100), 0, 0, 3_000, 3),
        (job(0.001, 31, 100), 0, 0, 3_100, 4),
        (job(0.001, 200, 100), 0, 0, 20_000, 4),
        (job(0.001, 201, 100), 0, 0, 20_100, 8),
        (job(0.001, 200, 100), 85, 0, 3_000, 3),  # 15 hours are left
        (job(0.001, 200, 100), 50, 10, 20_000, 4),  # what has happened counts
        (job(0.001, 200, 100), 50, 11, 21_000, 8),
        (job(0, 1, 100), 0, 0, 0, 2),
        (job(0.1, 1, None), 0, 0, 16_800, 4),  # unknown length: a week at least
        (job(0.1, 1, None), 200, 0, 20_000, 4),  # and as long as it has lasted
        (job(0.1, 1, None), 201, 0, 20_100, 8),
    ],
)
def test_what_was_said(
    expected: ExpectedFailures, trained_hours: int, restores: int, milli: int, bits: int
) -> None:
    past = Past(lossy_restores=restores)
    found = decide(expected, past, trained_ms=trained_hours * HOUR_MS)
    assert (found.expected_milli, found.bits, found.fallen_back) == (milli, bits, False)
    assert f"{milli / 1000:.3g} restores expected" in found.reason and "settings" in found.reason


@pytest.mark.parametrize(
    ("trained_ms", "restarts", "restores", "milli", "bits"),
    [
        (0, 0, 0, None, 8),  # nothing is known
        (1, 0, 0, None, 8),
        (HOUR_MS, 0, 0, 168_000, 8),
        (WEEK_MS // 20, 0, 0, 20_000, 4),
        (WEEK_MS // 3, 0, 0, 3_000, 3),
        (WEEK_MS, 0, 0, 1_000, 2),
        (WEEK_MS, 1, 0, 2_000, 3),  # restarts from exact rows cost nothing, and tell the rate
        (WEEK_MS, 1, 1, 3_000, 3),
        (WEEK_MS, 3, 3, 7_000, 4),
        (2 * WEEK_MS, 9, 9, 19_000, 4),
        (2 * WEEK_MS, 10, 10, 21_000, 8),
    ],
)
def test_what_the_past_suggests(
    trained_ms: int, restarts: int, restores: int, milli: int | None, bits: int
) -> None:
    past = Past(restarts=restarts, lossy_restores=restores)
    found = decide(None, past, trained_ms=trained_ms)
    assert (found.expected_milli, found.bits, found.fallen_back) == (milli, bits, False)
    assert ("restarts so far" in found.reason) == (milli is not None)


def test_the_rate_of_the_past_with_a_length_that_was_said() -> None:
    expected = ExpectedFailures(job_hours=30)
    found = decide(expected, Past(restarts=1), trained_ms=10 * HOUR_MS)
    assert found.expected_milli == 4_000  # 2 in 10 hours, 20 hours to go


def test_a_job_that_is_longer_than_was_said_has_the_widest() -> None:
    expected = job(0.001, 1, 10)
    assert decide(expected, Past(), trained_ms=10 * HOUR_MS - 1).bits == 2
    found = decide(expected, Past(), trained_ms=10 * HOUR_MS)
    assert (found.bits, found.expected_milli, found.fallen_back) == (8, None, False)
    assert "longer than the 10 h" in found.reason


def test_more_restores_than_were_said_are_the_end_of_few_bits() -> None:
    expected = job(0.002, 10, 100)  # two
    assert decide(expected, Past(lossy_restores=2), trained_ms=99 * HOUR_MS).bits == 3
    found = decide(expected, Past(lossy_restores=3), trained_ms=99 * HOUR_MS)
    assert (found.bits, found.fallen_back, found.expected_milli) == (8, True, 2_000)
    assert "3 restores from quantized rows, 2 were expected in 100 h" in found.reason


@pytest.mark.parametrize("restores", [1, 3, 20])
@pytest.mark.parametrize("hour", [0, 1, 50, 97])
def test_the_restores_that_were_said_are_within_the_estimate_whenever_they_come(
    restores: int, hour: int
) -> None:
    expected = job(restores / 100, 1, 100)
    trained_ms = hour * HOUR_MS
    written = decide(expected, Past(), trained_ms=trained_ms)
    for lossy in range(1, restores + 2):
        past = Past(trained_ms=trained_ms, restarts=lossy, lossy_restores=lossy, precision=written)
        written = decide(expected, past, trained_ms=trained_ms)
        assert written.fallen_back == (lossy > restores)
    assert written.bits == 8


def test_of_a_length_that_nobody_said_it_is_the_one_assumed_at_the_start() -> None:
    expected = job(0.01, 1, None)  # 1.68 in the week that is taken for the rest of a new job
    assert not decide(expected, Past(lossy_restores=1), trained_ms=0).fallen_back
    before = chosen(3, 2_680)  # one that was, and 1.68 to come
    for trained_ms in (0, 500 * HOUR_MS):  # one trainer does not go back on what it decided
        found = decide(expected, Past(lossy_restores=2, precision=before), trained_ms=trained_ms)
        assert (found.bits, found.fallen_back) == (8, True)
        assert "1.68 were expected in 168 h" in found.reason
    old = Past(trained_ms=500 * HOUR_MS, lossy_restores=8, precision=before)
    assert not decide(expected, old, trained_ms=old.trained_ms).fallen_back  # 10 in 1,000 hours


def test_a_decision_records_the_most_that_was_expected_on_its_line() -> None:
    expected = job(0.02, 1, 100)
    first = decide(expected, Past(), trained_ms=0)
    late = decide(expected, Past(precision=first), trained_ms=90 * HOUR_MS)
    assert (late.bits, late.expected_milli) == (2, 2_000)
    assert late.reason.startswith("0.2 restores expected")
    beyond = decide(expected, Past(precision=late), trained_ms=101 * HOUR_MS)
    assert (beyond.bits, beyond.expected_milli) == (8, 2_000)
    unknown = decide(None, Past(precision=late), trained_ms=0)
    assert (unknown.bits, unknown.expected_milli) == (8, 2_000)


def test_more_restores_than_were_ever_recorded_as_expected() -> None:
    past = Past(restarts=2, lossy_restores=2, precision=chosen(2, 1_000))
    found = decide(None, past, trained_ms=100 * WEEK_MS)
    assert (found.bits, found.fallen_back, found.expected_milli) == (8, True, 1_000)
    assert "2 restores from quantized rows, 1 were expected at most" in found.reason
    once = Past(restarts=1, lossy_restores=1, precision=chosen(2, 1_000))
    assert not decide(None, once, trained_ms=100 * WEEK_MS).fallen_back
    unknown = Past(restarts=2, lossy_restores=2, precision=chosen(8, None))
    assert not decide(None, unknown, trained_ms=100 * WEEK_MS).fallen_back


def test_the_end_of_few_bits_is_for_the_rest_of_the_job() -> None:
    before = chosen(8, 2_000, fallen_back=True)
    past = Past(lossy_restores=3, precision=before)
    for expected in (None, job(0, 1, 1e6), job(1, 1000, 1e6)):
        assert decide(expected, past, trained_ms=5 * WEEK_MS) == before


def model_tables(shapes: dict[str, tuple[int, int]], *, frozen: str = "") -> tuple[Table, ...]:
    model = nn.ModuleDict({name: nn.Embedding(*shape) for name, shape in shapes.items()})
    if frozen:
        model[frozen].requires_grad_(False)
    return find_tables(
        model, [SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]
    ).tables


_SMALL_ROWS = Precision().small_table_values // 16
SMALL, LARGE = (_SMALL_ROWS, 16), (_SMALL_ROWS + 1, 16)


@pytest.mark.parametrize(
    ("bits", "named", "expected"),
    [
        ("lossless", {}, {"small": 32, "large": 32, "frozen": 32}),
        (4, {}, {"small": 32, "large": 4, "frozen": 32}),
        (4, {"small": 4}, {"small": 4, "large": 4, "frozen": 32}),
        ("auto", {}, {"small": 32, "large": None, "frozen": 32}),
        ("auto", {"small": "auto"}, {"small": None, "large": None, "frozen": 32}),
        ("auto", {"large": "lossless"}, {"small": 32, "large": 32, "frozen": 32}),
        ("auto", {"large": 3, "small": 8}, {"small": 8, "large": 3, "frozen": 32}),
        ("lossless", {"large": "auto"}, {"small": 32, "large": None, "frozen": 32}),
    ],
)
def test_which_tables_are_under_the_rule(
    bits: Bits, named: dict[str, Bits], expected: dict[str, int | None]
) -> None:
    tables = model_tables({"small": SMALL, "large": LARGE, "frozen": LARGE}, frozen="frozen")
    assert table_widths(tables, Precision(bits=bits, tables=named)) == expected
    all_under = table_widths(tables, Precision(bits=bits, tables=named, small_table_values=0))
    others = {"large": expected["large"], "frozen": 32}
    assert all_under == others | {"small": in_all(bits, named.get("small"))}


def in_all(bits: Bits, own: Bits | None) -> int | None:
    """The width of a table that nothing exempts."""
    wanted = bits if own is None else own
    return None if wanted == "auto" else 32 if wanted == "lossless" else wanted


def test_auto_for_a_table_that_is_not_trained_is_refused() -> None:
    tables = model_tables({"large": LARGE, "frozen": LARGE}, frozen="frozen")
    with pytest.raises(SettingsError, match="not trained"):
        table_widths(tables, Precision(tables={"frozen": "auto"}, small_table_values=0))


def test_bits_of_a_width() -> None:
    assert in_bits(32, chosen(2, 0)) == 32
    assert in_bits(None, chosen(3, 2_000)) == 3
    assert in_bits(None, None) == 8  # nobody decided: as much as any decision would ask for


def test_a_half_precision_table_keeps_its_own_width_when_it_is_exact() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(4, 4, dtype=torch.bfloat16)})
    tables = find_tables(model, [SGD(model.parameters(), lr=0.1)]).tables
    assert table_widths(tables, Precision(bits="auto", small_table_values=16)) == {"t": 16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece(ModuleTable):
    """Some columns of a table."""

    of: Columns

    @property
    def columns(self) -> Columns:
        return self.of


def test_pieces_by_columns_have_the_width_of_their_table() -> None:
    pieces = [
        Piece(
            name="t",
            parameter_name="t.weight",
            module=nn.Embedding(512, dim),
            of=Columns(first=first, of=128),
        )
        for first, dim in ((0, 32), (32, 32), (64, 64))
    ]
    widths = table_widths(pieces, Precision(bits=4))
    assert [widths[piece.key] for piece in pieces] == [4, 4, 4]

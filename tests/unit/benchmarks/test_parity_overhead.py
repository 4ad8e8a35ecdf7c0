"""The simulated cost of failures, against closed forms where failures are rare or absent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parity.overhead import (
    Costs,
    auto_seconds,
    break_even_hours,
    overhead_of_checkpoints,
    overhead_of_parity,
)

_COSTS = Costs(
    stall_seconds=2.0,
    restore_seconds=300.0,
    stored_bytes=1e9,
    steady=1.0,
    recovering=0.5,
    whole_seconds=200.0,
)
_RARE_HOURS = 200.0
_RARE_SECONDS = _RARE_HOURS * 3_600


def test_a_rare_failure_costs_a_restore_and_half_an_interval() -> None:
    expected = 2.0 / 1_800 + (300 + 900) / _RARE_SECONDS
    found = overhead_of_checkpoints(_COSTS, _RARE_HOURS, 1_800.0)
    assert found == pytest.approx(expected, rel=0.03)


def test_without_stalls_more_checkpoints_cost_less() -> None:
    costs = replace(_COSTS, stall_seconds=0.0)
    found = [overhead_of_checkpoints(costs, 4.0, one) for one in (60.0, 1_800.0, 3_600.0)]
    assert found == sorted(found) and found[0] == pytest.approx((300 + 30) / 14_400, rel=0.1)


def test_with_parity_a_rare_failure_costs_what_its_recovery_loses() -> None:
    stalls = 2.0 / auto_seconds(_COSTS, 1e9)
    found = overhead_of_parity(_COSTS, _RARE_HOURS)
    assert found == pytest.approx(stalls + 0.5 * 200 / _RARE_SECONDS, rel=0.1)
    slower = overhead_of_parity(replace(_COSTS, steady=0.8), _RARE_HOURS)
    assert slower == pytest.approx(0.25, rel=0.02)


def test_where_failures_are_frequent_second_losses_go_back_to_the_checkpoint() -> None:
    safe = overhead_of_parity(replace(_COSTS, whole_seconds=1.0), 0.5)
    assert overhead_of_parity(_COSTS, 0.5) > safe + 0.5 * 200 / 1_800


def test_a_job_that_does_no_work_has_no_finite_overhead() -> None:
    costs = replace(_COSTS, stall_seconds=1e12, steady=1e-9, recovering=0.0)
    assert overhead_of_checkpoints(costs, 1e-3, 3_600.0) == float("inf")


def test_break_even_is_where_both_cost_the_same() -> None:
    costs = replace(_COSTS, steady=0.97)
    hours = break_even_hours(costs, [1_800.0])
    least = min(
        overhead_of_checkpoints(costs, hours, one) for one in (1_800.0, auto_seconds(costs, hours))
    )
    assert overhead_of_parity(costs, hours) == pytest.approx(least, rel=0.05)
    assert break_even_hours(replace(costs, steady=0.1), [1_800.0]) == 1.0
    assert break_even_hours(replace(costs, steady=1.0, stall_seconds=10.0), [600.0]) == 10_000.0

"""More failures never mean fewer bits, whatever else is so, and no clock of a host takes part."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from recpoint.format.history import ChosenPrecision, History
from recpoint.trainer_plugin.schedule.outlook import decide
from recpoint.trainer_plugin.settings import ExpectedFailures, Past

HOUR_MS = 3_600_000

counts = st.integers(0, 60)
trained = st.integers(0, 3_000 * HOUR_MS)
rates = st.floats(0, 10, allow_subnormal=False)
hours = st.none() | st.floats(0.01, 5_000)
widest = st.builds(
    ChosenPrecision,
    bits=st.just(8),
    expected_milli=st.none() | st.integers(0, 60_000),
    fallen_back=st.booleans(),
    reason=st.just("before"),
)
narrow = st.builds(
    ChosenPrecision,
    bits=st.sampled_from((2, 3, 4)),
    expected_milli=st.integers(0, 20_000),
    fallen_back=st.just(False),
    reason=st.just("before"),
)
precisions = st.none() | widest | narrow
pasts = st.builds(
    Past, trained_ms=trained, restarts=counts, lossy_restores=counts, precision=precisions
)


@st.composite
def failures(draw: st.DrawFn) -> ExpectedFailures | None:
    rate, job = draw(st.none() | rates), draw(hours)
    if rate is None:
        return None if job is None else ExpectedFailures(job_hours=job)
    return ExpectedFailures(per_node_hour=rate, nodes=draw(st.integers(1, 5_000)), job_hours=job)


@given(expected=failures(), past=pasts, trained_ms=trained, more=counts)
def test_more_restores_or_restarts_never_mean_fewer_bits(
    expected: ExpectedFailures | None, past: Past, trained_ms: int, more: int
) -> None:
    bits = decide(expected, past, trained_ms=trained_ms).bits
    restored = replace(past, lossy_restores=past.lossy_restores + more)
    restarted = replace(past, restarts=past.restarts + more)
    both = replace(restored, restarts=past.restarts + more)
    for worse in (restored, restarted, both):
        assert decide(expected, worse, trained_ms=trained_ms).bits >= bits


@given(
    rate=rates,
    nodes=st.integers(1, 5_000),
    job_hours=hours,
    past=pasts,
    trained_ms=trained,
    factor=st.floats(1, 100),
)
def test_a_higher_failure_rate_never_means_fewer_bits(
    rate: float,
    nodes: int,
    job_hours: float | None,
    past: Past,
    trained_ms: int,
    factor: float,
) -> None:
    # What was expected before must not be what makes the difference: an estimate that is raised
    # afterwards is no longer exceeded. What was exceeded stays recorded.
    calm = replace(past, lossy_restores=0)
    first = ExpectedFailures(per_node_hour=rate, nodes=nodes, job_hours=job_hours)
    bits = decide(first, calm, trained_ms=trained_ms).bits
    for worse in (
        replace(first, per_node_hour=rate * factor),
        replace(first, nodes=nodes * 2),
    ):
        assert decide(worse, calm, trained_ms=trained_ms).bits >= bits


@given(expected=failures(), past=pasts, trained_ms=trained)
def test_a_decision_is_one_that_a_manifest_can_hold(
    expected: ExpectedFailures | None, past: Past, trained_ms: int
) -> None:
    found = decide(expected, past, trained_ms=trained_ms)
    history = History(trained_ms=trained_ms, lossy_restores=past.lossy_restores, precision=found)
    assert History.model_validate(history.model_dump()) == history
    assert found.reason
    if found.expected_milli is None:
        assert found.bits == 8


@given(expected=failures(), past=pasts, start_ms=trained, steps=st.lists(trained, max_size=6))
def test_a_fall_back_lasts_through_any_number_of_restarts(
    expected: ExpectedFailures | None, past: Past, start_ms: int, steps: list[int]
) -> None:
    now, fallen = start_ms, False
    for step in steps:
        found = decide(expected, past, trained_ms=now)
        assert not fallen or (found.bits == 8 and found.fallen_back)
        fallen = fallen or found.fallen_back
        now += step
        past = Past(
            trained_ms=now,
            restarts=past.restarts + 1,
            lossy_restores=past.lossy_restores + 1,
            precision=found,
        )

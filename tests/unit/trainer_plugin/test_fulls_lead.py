"""How long before its cut a full's window opens: set, or by what was measured."""

from __future__ import annotations

import pytest

from recpoint.trainer_plugin.pipeline.lead import FullsLead

GIGABYTE = 1_000_000_000


class Clock:
    """A clock that batches move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lead_after_a_cut(clock: Clock, batches: int | None = None) -> FullsLead:
    """A lead at batch 100, of batches that take a tenth of a second."""
    lead = FullsLead(batches, share=0.5, batches_done=0, clock=clock)
    clock.seconds += 10.0
    lead.note_cut(100)
    clock.seconds += 1.0
    return lead


def due_batches(lead: FullsLead) -> int:
    """The most batches before a cut at which a window is due, at batch 110."""
    return max((n for n in range(1, 20_000) if lead.is_due(110, n)), default=0)


def test_a_number_that_is_set_is_followed(clock: Clock) -> None:
    lead = lead_after_a_cut(clock, 12)
    assert due_batches(lead) == 12 and not lead.is_due(110, 0)
    assert due_batches(lead_after_a_cut(clock, 0)) == 0


@pytest.mark.parametrize("stall_seconds", [None, 0.05])
def test_without_a_long_stall_no_full_is_copied_ahead(
    clock: Clock, stall_seconds: float | None
) -> None:
    lead = lead_after_a_cut(clock)
    if stall_seconds is not None:
        lead.note_plain_full(stall_seconds, GIGABYTE)
    assert due_batches(lead) == 0
    assert ("50 ms" if stall_seconds else "was measured yet") in lead.reason


def test_the_lead_follows_from_the_time_of_copy_and_batches(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lead = lead_after_a_cut(clock)
    with caplog.at_level("INFO", logger="recpoint"):
        lead.note_plain_full(0.3, GIGABYTE)
        lead.note_plain_full(0.3, GIGABYTE)
    assert ["300 ms" in text for text in caplog.messages] == [True]
    # Assumed: 1 GB a second, for half of the time. Half as much again for safety.
    assert due_batches(lead) == 30 and lead.is_due(110, 10)
    assert not lead.is_due(110, 9)
    lead.note_pace(GIGABYTE / 4)
    assert due_batches(lead) == 60
    lead.note_pace(0.0)  # a busy moment
    assert due_batches(lead) == 120
    for _ in range(7):
        lead.note_pace(0.0)
    assert due_batches(lead) == 10_000


def test_a_window_is_tried_again_after_fulls_without_time(clock: Clock) -> None:
    lead = lead_after_a_cut(clock)
    lead.note_plain_full(0.3, GIGABYTE)
    lead.note_pace(0.0)
    fulls_without_time = 0
    while not lead.is_due(110, 15):
        assert "too little time" in lead.reason
        lead.note_plain_full(0.3, GIGABYTE)
        lead.note_cut(100)
        lead.note_cut(100)  # the same time of a batch as before
        clock.seconds += 1.0
        fulls_without_time += 1
        assert fulls_without_time < 9
    assert fulls_without_time > 0


def test_a_full_whose_window_found_no_slot_says_nothing_of_the_pace(clock: Clock) -> None:
    lead = lead_after_a_cut(clock)
    lead.note_plain_full(0.3, GIGABYTE)
    assert lead.is_due(110, 15) and not lead.is_due(110, 1)
    lead.note_plain_full(0.3, GIGABYTE)
    assert due_batches(lead) == 30


def test_batches_are_measured_over_two_intervals(clock: Clock) -> None:
    lead = FullsLead(None, share=0.5, batches_done=0, clock=clock)
    lead.note_plain_full(0.3, GIGABYTE)
    assert not lead.is_due(0, 5)  # no batch was measured
    for cut_batches in (100, 200):
        clock.seconds += 10.0
        lead.note_cut(cut_batches)
    assert not lead.is_due(200, 100)  # the cut itself is no batch
    clock.seconds += 0.001
    assert not lead.is_due(201, 99)  # nor are they all as fast as the first one
    assert lead.is_due(201, 30)


def test_a_full_that_gains_nothing_is_measured_anew(clock: Clock) -> None:
    lead = lead_after_a_cut(clock)
    lead.note_plain_full(0.3, GIGABYTE)
    lead.note_full_ahead(0.02)
    assert due_batches(lead) == 30
    lead.note_full_ahead(0.3)
    assert due_batches(lead) == 0 and "was measured yet" in lead.reason
    lead.note_plain_full(0.3, GIGABYTE)
    assert due_batches(lead) == 30


def test_a_refusal_is_for_good_and_not_for_a_number_that_is_set(clock: Clock) -> None:
    lead, chosen = lead_after_a_cut(clock), lead_after_a_cut(clock, 12)
    for some_lead in (lead, chosen):
        some_lead.note_plain_full(0.3, GIGABYTE)
        some_lead.refuse("rows changed")
        some_lead.note_plain_full(0.3, GIGABYTE)
    assert due_batches(lead) == 0 and lead.reason == "rows changed"
    assert due_batches(chosen) == 12

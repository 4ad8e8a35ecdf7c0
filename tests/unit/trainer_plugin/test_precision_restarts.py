"""Real runs with bits="auto" and interval_seconds="auto": what is decided, stored and shown."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from recpoint import Checkpointer, Consecutive, ExpectedFailures
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.history import MAX_COUNT, ChosenPrecision, History
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.format.records import pack_record
from recpoint.trainer_plugin.schedule.schedule import MAX_SECONDS, MIN_SECONDS
from recpoint.trainer_plugin.settings import Precision
from tests.running_parts import pipeline_of
from tests.training_builder import (
    Place,
    checkpointer,
    simple_training,
    train,
    until,
)

#: Two restores expected in 100 hours.
TWO = ExpectedFailures(per_node_hour=0.01, nodes=2, job_hours=100)
#: The tables of these tests are small: they are named, so that they are under the rule.
BOTH: dict[str, Any] = {"users": "auto", "items": "auto"}


def manifests(place: Place) -> list[Manifest]:
    run = Run.open(open_store(place.run))
    return [run.manifest(*name) for name in run.live_line()]


def widths(manifest: Manifest, table: int) -> set[tuple[str | None, int | None]]:
    return {(c.scheme, c.bits) for c in manifest.chunks if c.table == table}


def _more(ckpt: Checkpointer, committed: int) -> bool:
    return ckpt.stats.committed > committed


def life(
    place: Place, *, step: int | None = None, generation: int | None = None, **settings: Any
) -> Manifest:
    """A trainer that restores, trains four batches, and is gone; the newest checkpoint."""
    training = simple_training()
    with place.agent(), checkpointer(training, place, **settings) as ckpt:
        ckpt.restore(step=step, generation=generation)
        for _ in range(2):
            committed = ckpt.stats.committed
            train(training, ckpt, 2)
            until(partial(_more, ckpt, committed))
        assert ckpt.stats.failed == 0
        newest = manifests(place)[0]
        assert ckpt.stats.precision == newest.history.precision
    return newest


def test_restores_beyond_the_estimate_end_in_8_bits_for_good(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="recpoint")
    found = []
    for restores in range(5):
        caplog.clear()
        newest = life(place, tables=BOTH, failures=TWO)
        precision = newest.history.precision
        assert precision is not None and newest.history.lossy_restores == restores
        assert ("asymmetric", precision.bits) in widths(newest, 0)
        assert f"{precision.bits} bits: {precision.reason}" in caplog.text
        found.append((precision.bits, precision.fallen_back))
    # Two to come; then one that was and nearly two to come; then two and two; then three.
    assert found == [(3, False), (3, False), (4, False), (8, True), (8, True)]
    assert "3 restores from quantized rows, 2 were expected" in caplog.text
    trained = [manifest.history.trained_ms for manifest in reversed(manifests(place))]
    assert trained == sorted(trained)
    # A trainer that is told otherwise later does not go back to fewer bits.
    more = ExpectedFailures(per_node_hour=0, job_hours=100)
    precision = life(place, tables=BOTH, failures=more).history.precision
    assert precision is not None and precision.bits == 8 and precision.fallen_back


def test_going_back_to_before_a_fall_back_does_not_undo_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    never = ExpectedFailures(per_node_hour=0, job_hours=100)
    life(place, tables=BOTH, failures=never)
    fallen = life(place, tables=BOTH, failures=never).history.precision
    assert fallen is not None and fallen.bits == 8 and fallen.fallen_back
    # One that goes back, and is gone before it has a checkpoint.
    settings: dict[str, Any] = {"tables": BOTH, "failures": TWO}
    with checkpointer(simple_training(), place, **settings) as ckpt:
        ckpt.restore(step=4)
    # To the next one that is the newest of its line; and of what lies beside it, one is damaged.
    run = Run.open(open_store(place.run))
    run.store.delete(MANIFEST_KEY.of(8, 2))
    run.store.put(MANIFEST_KEY.of(8, 2), b"{}")
    newest = life(place, **settings)
    assert (newest.step, newest.generation, newest.history.lossy_restores) == (8, 4, 1)
    assert newest.history.precision == fallen
    assert "step 8 (generation 2) is left behind, and cannot be read" in caplog.text
    # A start never fails for it.
    for name in run.manifest_names():
        if name.generation > 1:
            run.store.delete(MANIFEST_KEY.of(*name))
            run.store.put(MANIFEST_KEY.of(*name), b"{}")
    unknown = life(place, step=4, **settings).history.precision
    assert unknown is not None and not unknown.fallen_back


def test_a_fall_back_of_another_job_in_between_is_not_taken_over(place: Place) -> None:
    never = ExpectedFailures(per_node_hour=0, job_hours=100)
    settings: dict[str, Any] = {"tables": BOTH, "failures": TWO}
    life(place, **settings)
    with checkpointer(simple_training(), place) as ckpt:
        ckpt.restore(fresh=True)
        assert ckpt.checkpoint()
    fallen = life(place, tables=BOTH, failures=never).history.precision
    again = life(place, tables=BOTH, failures=never).history.precision
    assert fallen is not None and again is not None and again.fallen_back
    back = life(place, step=4, generation=1, **settings).history.precision
    assert back is not None and not back.fallen_back


def test_widths_differ_within_a_chain_and_it_restores(place: Place) -> None:
    never = ExpectedFailures(per_node_hour=0, job_hours=100)
    life(place, tables=BOTH, failures=never, policy=Consecutive(full_every=9))
    life(place, tables=BOTH, failures=never, policy=Consecutive(full_every=9))
    newest, _, _, oldest = manifests(place)
    assert newest.chain_length == 4
    assert widths(oldest, 0) == {("asymmetric", 2)}
    assert widths(newest, 0) == {("asymmetric", 8)}  # a restore, and none had been expected
    training = simple_training(5)
    with checkpointer(training, place) as ckpt:
        report = ckpt.restore()
        assert report is not None and report.quantized and report.chain_length == 4


def test_only_restores_from_quantized_rows_count(place: Place) -> None:
    for _ in range(3):
        exact = life(place)
        assert exact.history.lossy_restores == 0 and exact.history.precision is None
    first = life(place, tables=BOTH, failures=TWO)
    assert first.history.lossy_restores == 0
    assert life(place).history.lossy_restores == 1  # lossless again: what was lost stays lost
    with place.agent(), checkpointer(simple_training(), place) as ckpt:
        ckpt.restore(fresh=True)
        assert ckpt.checkpoint()
    assert manifests(place)[0].history.lossy_restores == 0


def test_parts_of_a_quantized_checkpoint_have_lost_what_it_lost(place: Place) -> None:
    life(place, bits=4)
    life(place, bits=4)
    with place.agent(), checkpointer(simple_training(), place) as ckpt:
        report = ckpt.restore(partial={"tables": ["users"]})
        assert report is not None and report.quantized
        assert ckpt.checkpoint()
    history = manifests(place)[0].history
    assert history.lossy_restores == 2 and history.trained_ms < 60_000


def test_without_settings_and_without_a_past_it_is_8_bits(place: Place) -> None:
    for _ in range(2):
        newest = life(place, tables={"users": "auto"})
        precision = newest.history.precision
        assert precision is not None and not precision.fallen_back
        assert (precision.bits, precision.expected_milli) == (8, None)
        assert "past is too short" in precision.reason
        assert widths(newest, 0) == {("asymmetric", 8)}
        assert widths(newest, 1) == {("exact", 32)}


@pytest.mark.parametrize("settings", [{"bits": "auto", "failures": TWO}, {"bits": 4}])
def test_small_tables_are_exact_where_nothing_else_was_said(
    place: Place, settings: dict[str, Any]
) -> None:
    newest = life(place, small_table_values=Precision().small_table_values, **settings)
    assert newest.history.precision is None  # no table is under the rule
    assert widths(newest, 0) == widths(newest, 1) == {("exact", 32)}


class OneLargeTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(5_000, 8)
        self.small = nn.Embedding(100, 8)
        self.top = nn.Linear(8, 1)


def test_a_large_table_is_under_the_rule_beside_a_small_one(place: Place) -> None:
    model = OneLargeTable()
    ckpt = Checkpointer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        run=place.run,
        staging=place.staging,
        interval_batches=1,
        bits="auto",
        failures=TWO,
    )
    with place.agent(), ckpt:
        ckpt.restore()
        assert ckpt.checkpoint()
    (manifest,) = manifests(place)
    assert widths(manifest, 0) == {("asymmetric", 3)}
    assert widths(manifest, 1) == {("exact", 32)}


def test_a_past_as_large_as_a_record_can_hold_fails_no_checkpoint(place: Place) -> None:
    last = ChosenPrecision(bits=4, expected_milli=MAX_COUNT, fallen_back=False, reason="x" * 500)
    history = History(trained_ms=MAX_COUNT, lossy_restores=MAX_COUNT, precision=last)
    first = life(place, bits=4)
    run = Run.open(open_store(place.run))
    key = MANIFEST_KEY.of(first.step, first.generation)
    run.store.delete(key)
    run.store.put(key, pack_record(first.model_copy(update={"history": history})))
    newest = life(place, tables=BOTH)
    assert newest.history.trained_ms == newest.history.lossy_restores == MAX_COUNT
    assert newest.history.precision is not None and newest.history.precision.bits == 8


def test_clocks_of_hosts_make_no_difference(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    for offset_years in (0, -50, 200):
        shift = offset_years * 365 * 86_400 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda shift=shift: max(0, real() + shift))
        history = life(place, tables=BOTH).history
        assert history.trained_ms < 600_000
        assert history.precision is not None and history.precision.bits == 8


def test_an_interval_that_follows_from_what_checkpoints_cost(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="recpoint")
    training = simple_training()
    settings = {"interval_batches": None, "interval_seconds": "auto", "failures": TWO}
    with place.agent(), checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        first = ckpt.stats.interval
        assert first is not None and first.seconds == 60.0
        assert training.reader.told == [1]
        train(training, ckpt, 1)
        assert len(training.reader.told) == 2 and training.reader.told[1] == 2
        assert ckpt.checkpoint()
        measured = ckpt.stats.interval
        assert measured is not None and "a stall of" in measured.reason
        assert "0.02 failures an hour (settings)" in measured.reason
        stall_seconds = sum(ckpt.stats.stalls_ms) / len(ckpt.stats.stalls_ms) / 1e3
        best = math.sqrt(2 * stall_seconds * 50 * 3600)
        assert measured.seconds == pytest.approx(min(max(best, MIN_SECONDS), MAX_SECONDS))
        until(lambda: ckpt.stats.committed == 1)
        assert ckpt.stats.failed == 0
    told = [r.getMessage() for r in caplog.records if "interval_seconds" in r.getMessage()]
    assert "60 s: no checkpoint has been measured" in told[0]


def test_checkpoints_that_waited_for_one_outage_count_it_once(place: Place) -> None:
    training = simple_training()
    with checkpointer(training, place, interval_batches=1, jobs=3) as ckpt:
        ckpt.restore()
        began = time.monotonic()
        train(training, ckpt, 3)
        until(lambda: ckpt.stats.staged == 3)
        with place.agent():
            until(lambda: ckpt.stats.committed == 3)
        measured = pipeline_of(ckpt).statistics._persists_seconds
        assert len(measured) == 3 and sum(measured) <= time.monotonic() - began

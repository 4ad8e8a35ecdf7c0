"""What a trainer leaves in the store when it ends, and what its manifests say of the next one."""

from __future__ import annotations

import pytest

from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.training_builder import Place, checkpointer, simple_training, train, until


def opened(place: Place) -> Run:
    return Run.open(open_store(place.run))


def test_an_end_without_new_batches_is_told_too(place: Place) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place, interval_batches=2) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
        until(lambda: ckpt.stats.committed >= 1)
    end = read_end(opened(place), 1)
    assert end is not None and (end.step, end.reason) == (4, "finished")
    seen = RunWatch(opened(place)).refresh()
    assert seen.ended is not None and seen.lag.at_risk_batches == 0


def test_without_an_agent_what_is_not_stored_is_told(place: Place) -> None:
    training = simple_training()
    with checkpointer(training, place, interval_batches=2, close_seconds=0.0) as ckpt:
        ckpt.restore()
        train(training, ckpt, 3)
    seen = RunWatch(opened(place)).refresh()
    assert seen.ended is not None and seen.lag.at_risk_batches == 3
    place.persist_all()
    assert RunWatch(opened(place)).refresh().lag.at_risk_batches == 1


def test_an_end_without_a_last_checkpoint_wants_what_was_cut(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2)
    ckpt.restore()
    train(training, ckpt, 3)
    ckpt.close(final=False)
    end = read_end(opened(place), 1)
    assert end is not None and end.step == 2


def test_the_exception_that_ends_a_training_is_named(place: Place) -> None:
    training = simple_training()
    with pytest.raises(ZeroDivisionError), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        raise ZeroDivisionError("loss of\nbatch 2 " + "x" * 2000)
    end = read_end(opened(place), 1)
    assert end is not None and end.step == 1
    assert end.reason.startswith("failed: ZeroDivisionError: loss of\nbatch 2")
    seen = RunWatch(opened(place)).refresh()
    assert seen.ended is not None and seen.ended.reason == "failed"
    (alarm,) = alarms(seen)
    assert alarm.trouble == "failed" and "ZeroDivisionError: loss of" in alarm.text
    assert "after step 1" in alarm.text and "no checkpoint is stored" in alarm.text
    again = checkpointer(simple_training(), place)
    again.restore()
    again.close(final=False)
    ((restart),) = (one for one in RunWatch(opened(place)).refresh().failures)
    assert restart.kind == "restart"


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({"interval_batches": 3}, (None, 3)),
        ({"interval_batches": None, "interval_seconds": 7.5}, (7_500, None)),
        ({"interval_batches": None, "interval_seconds": "auto"}, (None, None)),
    ],
)
def test_a_checkpoint_says_when_the_next_one_is_due(
    place: Place, settings: dict[str, object], due: tuple[int | None, int | None]
) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        ckpt.checkpoint()
        until(lambda: ckpt.stats.committed == 1)
        train(training, ckpt, 1)
        ckpt.checkpoint()
    run = opened(place)
    second, first = (run.manifest(*name).history for name in run.live_line())
    assert (first.due_ms, first.due_batches) == due
    if settings.get("interval_seconds") == "auto":  # by then a checkpoint has been measured
        assert second.due_ms is not None and second.due_ms >= 10_000

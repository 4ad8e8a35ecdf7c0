"""Two trainers on one run URL, each on a host of its own: a staging area and an agent for each.

Whoever started last owns the run; the other is told so, trains on, and harms nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from recpoint import Checkpointer
from recpoint.catalog.check.check import check
from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.catalog.store.store import open_store
from recpoint.errors import StaleWriter
from recpoint.format.naming import MANIFEST_KEY
from tests.fault.lives import serving
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    everything,
    persist_all,
    simple_training,
    train,
    until,
)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Place, Place]:
    """Two hosts that train one run."""
    run = str(tmp_path / "run")
    return Place(run, tmp_path / "host-1"), Place(run, tmp_path / "host-2")


@pytest.fixture(autouse=True)
def no_observer_stays() -> Iterator[None]:
    yield
    durable.set_observer(None)


def start(place: Place, seed: int) -> tuple[Training, Checkpointer]:
    training = simple_training(seed)
    ckpt = checkpointer(training, place, drain_seconds=0.0)
    ckpt.restore()
    return training, ckpt


def assert_newest_is(place: Place, training: Training, *, line: list[tuple[int, int]]) -> None:
    """A third trainer finds this line, and goes on exactly where `training` is."""
    expected = everything(training)
    run = Run.open(open_store(place.run))
    assert run.live_line() == line
    assert check(run, level="full").ok
    third = Place(place.run, place.staging.with_name("host-3"))
    again, ckpt = start(third, 77)
    ckpt.close(final=False)
    assert everything(again) == expected


def assert_replaced(ckpt: Checkpointer, *, line: str) -> None:
    """Its trainer was told, once, by whom it was replaced and what to do."""
    stats = ckpt.stats
    assert stats.failed == 1 and stats.last_error is not None
    assert stats.last_error.startswith("StaleWriter: checkpoint of ")
    for part in (line, "found ", "expected ", "generation 2", "stop the second trainer"):
        assert part in stats.last_error


@pytest.mark.parametrize("next_to_checkpoint", ["first", "second"])
def test_the_second_takes_over_and_the_first_trains_on(
    hosts: tuple[Place, Place], next_to_checkpoint: str
) -> None:
    with ExitStack() as agents:
        for place in hosts:
            agents.enter_context(serving(place.staging, {}))
        first, replaced = start(hosts[0], 1)
        train(first, replaced, 2)
        until(lambda: replaced.stats.committed == 1)  # the agents are starting
        second, owner = start(hosts[1], 2)
        assert owner.batches_done == 2

        def let_first() -> None:
            train(first, replaced, 2)
            until(lambda: replaced.stats.failed == 1)
            train(first, replaced, 6)

        def let_second() -> None:
            train(second, owner, 2)
            until(lambda: owner.stats.committed == 1)

        for let in [let_first, let_second][:: 1 if next_to_checkpoint == "first" else -1]:
            let()
        assert_replaced(replaced, line="step 4")
        assert (replaced.stats.committed, replaced.stats.skipped) == (1, 3)
        assert replaced.batches_done == 10
        replaced.close()
        assert replaced.stats.failed == 1, "nobody asks for what cannot be"
        # Both draw from the generators of this process: the one to compare has to be the last.
        train(second, owner, 2)
        owner.close()
        assert (owner.stats.committed, owner.stats.failed) == (2, 0)
    run = Run.open(open_store(hosts[0].run))
    assert run.superseded() == []
    assert_newest_is(hosts[1], second, line=[(6, 2), (4, 2), (2, 1)])


def test_a_replaced_trainer_may_ask_to_be_stopped(hosts: tuple[Place, Place]) -> None:
    training = simple_training()
    replaced = checkpointer(training, hosts[0], on_error="raise")
    replaced.restore()
    _, owner = start(hosts[1], 2)
    with pytest.raises(StaleWriter, match="generation 2"), hosts[0].agent():
        until(lambda: train(training, replaced, 1))
    owner.close(final=False)
    replaced.close(final=False)


def test_a_superseded_trainer_says_so_until_its_end(
    hosts: tuple[Place, Place], caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    replaced = checkpointer(training, hosts[0], interval_batches=2, close_seconds=0.0)
    replaced.restore()
    _, owner = start(hosts[1], 2)
    train(training, replaced, 2)
    until(lambda: replaced.stats.staged == 1)
    persist_all(hosts[0].staging)
    until(lambda: replaced.stats.failed == 1)
    error = replaced.stats.last_error
    assert error is not None and "no later checkpoint of this trainer is stored" in error
    assert "the next checkpoint also holds these rows" not in error
    watch = RunWatch(Run.open(open_store(hosts[0].run)))
    (superseded,) = (one for one in alarms(watch.refresh()) if one.trouble == "superseded")
    assert "trained on after generation 2 took over the run" in superseded.text

    caplog.clear()
    train(training, replaced, 16)  # eight due checkpoints
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.partition(":")[0] for text in warnings] == [
        f"no checkpoint at batch {2 + 2 * in_row}, {in_row} in a row not taken"
        for in_row in (1, 2, 4, 8)
    ]
    caplog.clear()
    replaced.close()
    (last,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert last.startswith("training ends, and nothing that it trained after step 0 is stored")
    assert all(one.trouble != "superseded" for one in alarms(watch.refresh()))
    owner.close(final=False)


def test_a_superseded_trainer_may_raise_though_other_errors_do_not(
    hosts: tuple[Place, Place],
) -> None:
    training = simple_training()
    replaced = checkpointer(training, hosts[0], on_superseded="raise")
    replaced.restore()
    _, owner = start(hosts[1], 2)
    with pytest.raises(StaleWriter, match="no later checkpoint"), hosts[0].agent():
        until(lambda: train(training, replaced, 1))
    owner.close(final=False)
    replaced.close(final=False)


def test_a_commit_that_slips_past_the_fence_counts_for_nobody(hosts: tuple[Place, Place]) -> None:
    """The second starts between the fence and the manifest of the first: step 4 exists twice."""
    first, replaced = start(hosts[0], 1)
    train(first, replaced, 2)
    until(lambda: replaced.stats.staged == 1)
    persist_all(hosts[0].staging)
    until(lambda: replaced.stats.committed == 1)
    train(first, replaced, 2)
    until(lambda: replaced.stats.staged == 2)
    started: list[tuple[Training, Checkpointer]] = []

    def take_over(step: str) -> None:
        if step == f"link {Path(MANIFEST_KEY.of(4, 1)).name}" and not started:
            started.append(start(hosts[1], 2))

    durable.set_observer(take_over)
    persist_all(hosts[0].staging)
    durable.set_observer(None)
    ((second, owner),) = started
    assert owner.batches_done == 2
    until(lambda: replaced.stats.committed == 2)
    train(second, owner, 2)
    with hosts[1].agent():
        owner.close()
    assert owner.stats.committed == 1
    run = Run.open(open_store(hosts[0].run))
    assert run.superseded() == [(4, 1)]
    parent = run.manifest(4, 2).parent
    assert parent is not None and (parent.step, parent.generation) == (2, 1)
    assert_newest_is(hosts[1], second, line=[(4, 2), (2, 1)])
    replaced.close(final=False)


def test_increments_of_an_earlier_attempt_lie_about_and_do_not_count(
    hosts: tuple[Place, Place],
) -> None:
    place = hosts[0]
    first, ckpt = start(place, 1)
    with place.agent():
        for _ in range(3):
            train(first, ckpt, 2)
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 2)
        ckpt.close(final=False)
    second = simple_training(2)
    again = checkpointer(second, place)
    again.restore(2)
    second.reader.load_state_dict(simple_training(9).reader.state_dict())  # other batches
    with place.agent():
        train(second, again, 2)
        again.close()
    run = Run.open(open_store(place.run))
    assert run.superseded() == [(6, 1), (4, 1)]
    assert_newest_is(place, second, line=[(4, 2), (2, 1)])


@pytest.mark.parametrize("answered", ["before", "after"])
def test_a_job_of_an_earlier_attempt_is_rejected_and_its_step_committed_anew(
    hosts: tuple[Place, Place], answered: str
) -> None:
    """The first trainer died with step 2 staged; its agent comes to it too late."""
    place = hosts[0]
    first, ckpt = start(place, 1)
    train(first, ckpt, 2)
    ckpt.close(final=False)
    (stale,) = StagedRun(place.run_directory).staged_jobs()
    with AgentLock(place.staging):
        second, again = start(place, 2)
        if answered == "before":
            persist_job(stale)
        train(second, again, 2)
        until(lambda: again.stats.staged == 1)
        assert persist_all(place.staging) == 1 + (answered == "after")
        until(lambda: again.stats.committed == 1)
        again.close(final=False)
    assert again.stats.failed == 0
    left = job_files.read_outcome(place.run_directory / "outcomes" / stale.name)
    assert (left.result, left.error_type) == ("rejected", "StaleWriter")
    assert_newest_is(place, second, line=[(2, 2)])


def test_where_the_lock_file_was_removed_no_snapshot_is_written_over_anothers(
    hosts: tuple[Place, Place],
) -> None:
    """As by what clears directories of temporary files, while the first trainer lives on."""
    place = hosts[0]
    first, ckpt = start(place, 1)
    with place.agent():
        train(first, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
    StagedRun(place.run_directory).trainer_lock_path().unlink()
    second, again = start(place, 2)
    train(second, again, 2)
    until(lambda: again.stats.staged == 1)
    train(first, ckpt, 2)
    until(lambda: ckpt.stats.failed == 1)
    assert ckpt.stats.last_error is not None and "lock held by" in ckpt.stats.last_error
    ckpt.close(final=False)
    (job,) = StagedRun(place.run_directory).staged_jobs()
    assert persist_job(job).result == "committed"
    again.close(final=False)
    run = Run.open(open_store(place.run))
    assert run.live_line() == [(4, 2), (2, 1)] and check(run, level="full").ok


def test_a_job_that_two_agents_have_is_committed_once(hosts: tuple[Place, Place]) -> None:
    """A host whose disk was copied: both commit the same attempt of the same step."""
    training, ckpt = start(hosts[0], 1)
    train(training, ckpt, 2)
    until(lambda: ckpt.stats.staged == 1)
    shutil.copytree(hosts[0].staging, hosts[1].staging)
    for place in hosts:
        (job,) = StagedRun(place.run_directory).staged_jobs()
        assert persist_job(job).result == "committed"
    until(lambda: ckpt.stats.committed == 1)
    ckpt.close(final=False)
    assert_newest_is(hosts[0], training, line=[(2, 1)])


def test_a_step_is_checkpointed_once_however_often_it_is_asked_for(
    hosts: tuple[Place, Place],
) -> None:
    training, ckpt = start(hosts[0], 1)
    with hosts[0].agent():
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.committed == 1)
        assert not ckpt.checkpoint()
        train(training, ckpt, 2)  # the second is due by the interval
        assert not ckpt.checkpoint()
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (2, 0)
    assert_newest_is(hosts[0], training, line=[(3, 1), (1, 1)])

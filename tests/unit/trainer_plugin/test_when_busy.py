"""A checkpoint that is due while the one before is still on its way: skip, wait, cancel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from recpoint import Checkpointer
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.policy import POLICIES
from recpoint.trainer_plugin.settings import Staging
from tests.persisted import store_groups
from tests.training_builder import Place, Training, checkpointer, simple_training, train, until


def steps(place: Place) -> list[tuple[int, str]]:
    run = Run.open(open_store(place.run))
    return [(name.step, run.manifest(*name).kind) for name in reversed(run.live_line())]


def check_restores(place: Place, training: Training) -> None:
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())
    assert torch.equal(target.tables["items"].values, training.model.items.weight.detach())


@contextmanager
def idle_agent(place: Place) -> Iterator[None]:
    """An agent that is there and has not come to the job yet."""
    with AgentLock(place.staging):
        yield


def cancelling(place: Place, **settings: Any) -> tuple[Training, Checkpointer]:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2, when_busy="cancel", **settings)
    ckpt.restore()
    return training, ckpt


def marked(place: Place) -> list[str]:
    return sorted(path.name for path in StagedRun(place.run_directory).cancels_directory.glob("*"))


def is_marked(place: Place) -> bool:
    """Whether one job is to be dropped: by a mark, and not by the file that is to be one."""
    found = marked(place)
    return len(found) == 1 and not found[0].startswith(".tmp-")


def stage_one(training: Training, ckpt: Checkpointer) -> None:
    before = ckpt.stats.staged
    train(training, ckpt, 2)
    until(lambda: ckpt.stats.staged == before + 1)


def test_waiting_takes_the_checkpoint_that_is_due(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, when_busy="wait")
    ckpt.restore()
    with place.agent():
        train(training, ckpt, 6)
        assert ckpt.stats.skipped == 0 and 0 <= ckpt.stats.waited <= 5
        ckpt.close()
    assert [step for step, _ in steps(place)] == [1, 2, 3, 4, 5, 6]
    check_restores(place, training)


def test_waiting_waits_for_the_agent_until_it_has_answered(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2, when_busy="wait")
    ckpt.restore()
    with idle_agent(place):
        stage_one(training, ckpt)
        late = threading.Thread(target=place.persist_all)
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.staged == 1)
        late.start()
        train(training, ckpt, 1)
        late.join()
        assert ckpt.stats.committed == 1 and ckpt.stats.skipped == 0
        until(lambda: ckpt.stats.staged == 2)
        place.persist_all()
        ckpt.close()
    assert [step for step, _ in steps(place)] == [2, 4]


@pytest.mark.parametrize("agent", [True, False])
def test_waiting_ends(place: Place, agent: bool) -> None:
    training = simple_training()
    ckpt = checkpointer(
        training, place, when_busy="wait", busy_wait_seconds=0.05 if agent else 600.0
    )
    ckpt.restore()
    if agent:
        with idle_agent(place):
            stage_one(training, ckpt)
            train(training, ckpt, 2)
    else:
        stage_one(training, ckpt)
        train(training, ckpt, 2)  # nobody would answer
    assert (ckpt.stats.waited, ckpt.stats.skipped, ckpt.stats.staged) == (1, 1, 1)
    ckpt.close(final=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelling_takes_the_due_checkpoint_at_the_next_batch(place: Place, policy: str) -> None:
    training, ckpt = cancelling(place, policy=policy)
    with idle_agent(place):
        stage_one(training, ckpt)
        place.persist_all()
        until(lambda: ckpt.stats.committed == 1)
        stage_one(training, ckpt)
        train(training, ckpt, 2)  # 6: due, and 4 is to be dropped
        until(lambda: marked(place) == ["00000001-000000000004-r00000.json"])
        train(training, ckpt, 3)  # training goes on
        assert ckpt.stats.staged == 2 and training.reader.told[-3:] == [1, 1, 1]
        place.persist_all()
        until(lambda: ckpt.stats.cancelled == 1)
        assert marked(place) == []
        train(training, ckpt, 1)  # 10
        until(lambda: ckpt.stats.staged == 3)
        assert training.reader.told[-1] == 2
        place.persist_all()
        until(lambda: ckpt.stats.committed == 2)
        check_restores(place, training)
        ckpt.close()
    assert steps(place) == [(2, "full"), (10, "increment")]
    stats = ckpt.stats
    assert (stats.skipped, stats.failed, stats.cancelled, stats.last_error) == (0, 0, 1, None)


def test_a_cancelled_full_gives_its_rows_back(place: Place) -> None:
    training, ckpt = cancelling(place)
    with idle_agent(place):
        stage_one(training, ckpt)
        train(training, ckpt, 2)
        until(lambda: is_marked(place))
        place.persist_all()
        until(lambda: ckpt.stats.cancelled == 1)
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.staged == 2)
        place.persist_all()
        until(lambda: ckpt.stats.committed == 1)
        ckpt.close(final=False)
    assert steps(place) == [(5, "full")]
    check_restores(place, training)


def test_the_checkpoint_in_its_place_is_not_cancelled_itself(place: Place) -> None:
    training, ckpt = cancelling(place)
    with idle_agent(place):
        stage_one(training, ckpt)
        train(training, ckpt, 2)
        until(lambda: is_marked(place))
        place.persist_all()
        until(lambda: ckpt.stats.cancelled == 1)
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.staged == 2)
        train(training, ckpt, 4)
        assert (ckpt.stats.skipped, ckpt.stats.cancelled) == (2, 1) and marked(place) == []
        place.persist_all()
        until(lambda: ckpt.stats.committed == 1)
        stage_one(training, ckpt)
        train(training, ckpt, 2)  # one has been stored: now it may be
        until(lambda: is_marked(place))
        ckpt.close(final=False)


def test_a_job_that_is_committed_all_the_same(place: Place) -> None:
    training, ckpt = cancelling(place)
    with idle_agent(place):
        stage_one(training, ckpt)
        (job_file,) = StagedRun(place.run_directory).staged_jobs()
        job = persist.PersistJob.open(job_file)
        store_groups(job)
        committed = job.commit()
        train(training, ckpt, 2)
        until(lambda: is_marked(place))
        job.finish(committed)
        until(lambda: ckpt.stats.committed == 1)
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.staged == 2)
        place.persist_all()
        ckpt.close(final=False)
    assert steps(place) == [(2, "full"), (5, "increment")] and marked(place) == []
    assert ckpt.stats.cancelled == 0
    check_restores(place, training)


def test_what_is_due_is_given_up_after_a_while(place: Place) -> None:
    training, ckpt = cancelling(place, busy_wait_seconds=0.0)
    with idle_agent(place):
        stage_one(training, ckpt)
        train(training, ckpt, 2)
        assert ckpt.stats.skipped == 0
        train(training, ckpt, 1)
        assert ckpt.stats.skipped == 1 and training.reader.told[-2:] == [1, 1]
        ckpt.close(final=False)


def test_a_skipped_checkpoint_is_taken_late_as_soon_as_there_is_room(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=16)
    ckpt.restore()
    train(training, ckpt, 16)
    until(lambda: ckpt.stats.staged == 1)
    train(training, ckpt, 18)  # due at 32; an eighth of the interval later there is no room yet
    assert (ckpt.stats.staged, ckpt.stats.skipped) == (1, 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)
    train(training, ckpt, 2)
    until(lambda: ckpt.stats.staged == 2)
    assert training.reader.told == [16, 16, 2, 2, 16]
    place.persist_all()
    ckpt.close(final=False)
    assert steps(place) == [(16, "full"), (36, "increment")] and ckpt.stats.skipped == 1
    check_restores(place, training)


def test_an_overdue_checkpoint_is_counted_once_an_interval(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=10)
    ckpt.restore()
    train(training, ckpt, 10)
    until(lambda: ckpt.stats.staged == 1)
    train(training, ckpt, 20)
    assert ckpt.stats.skipped == 2
    assert training.reader.told == [10, 10, 2, 2, 2, 2, 2, 2]
    ckpt.close(final=False)


def test_without_an_agent_nothing_is_cancelled(place: Place) -> None:
    training, ckpt = cancelling(place)
    stage_one(training, ckpt)
    train(training, ckpt, 2)
    assert ckpt.stats.skipped == 1 and marked(place) == []
    ckpt.close(final=False)


def test_the_end_of_training_takes_what_is_due(place: Place) -> None:
    training, ckpt = cancelling(place)
    with idle_agent(place):
        stage_one(training, ckpt)
        train(training, ckpt, 2)
        until(lambda: is_marked(place))
    with place.agent():
        ckpt.close()
    assert steps(place) == [(4, "full")] and ckpt.stats.cancelled == 1
    check_restores(place, training)


def test_a_new_trainer_withdraws_what_the_last_one_cancelled(place: Place) -> None:
    training, ckpt = cancelling(place)
    with idle_agent(place):
        stage_one(training, ckpt)
        train(training, ckpt, 2)
        until(lambda: is_marked(place))
        ckpt.close(final=False)
    (StagedRun(place.run_directory).cancels_directory / ".tmp-half").write_bytes(b"{")
    again = checkpointer(simple_training(2), place, drain_seconds=60.0)
    restored = []
    with idle_agent(place):
        starting = threading.Thread(target=lambda: restored.append(again.restore()))
        starting.start()
        until(lambda: marked(place) == [])  # and it waits for the job, which is wanted again
        place.persist_all()
        starting.join()
        again.close(final=False)
    assert restored[0] is not None and restored[0].restored.step == 2


def test_cancelling_is_for_one_staged_job() -> None:
    with pytest.raises(SettingsError, match=r"Staging\.jobs"):
        Staging(when_busy="cancel", jobs=2)

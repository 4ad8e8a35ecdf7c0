"""What checkpoints hold, and what they stand on, under each policy in a real training."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from recpoint import Checkpointer, OneShot
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.trainer_plugin.policy import POLICIES, Sizes
from tests.running_parts import pipeline_of
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    reject,
    simple_training,
    train,
    until,
)


class Stored(NamedTuple):
    """One checkpoint: its kind, its parent's step, its chain's length, its rows."""

    step: int
    kind: str
    parent: int | None
    chain_length: int
    rows: int


def manifests(place: Place) -> list[Manifest]:
    run = Run.open(open_store(place.run))
    return [run.manifest(*name) for name in reversed(run.live_line())]


def line(place: Place) -> list[Stored]:
    return [
        Stored(m.step, m.kind, m.parent.step if m.parent else None, m.chain_length, m.dirty_rows)
        for m in manifests(place)
    ]


def look_up(training: Training, user: int) -> None:
    """A batch that trains one row of the users and none of the items."""
    training.optimizers[0].zero_grad()
    training.model.users(torch.tensor([user])).sum().backward()
    training.optimizers[0].step()


def step(training: Training, ckpt: Checkpointer, place: Place, *users: int) -> None:
    """One checkpoint, committed, of a batch that trains these rows."""
    for user in users:
        look_up(training, user)
    before = ckpt.stats.committed
    staged_before = ckpt.stats.staged
    ckpt.step()
    until(lambda: ckpt.stats.staged == staged_before + 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == before + 1)


def check_restores(place: Place, training: Training) -> None:
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())
    assert torch.equal(target.tables["items"].values, training.model.items.weight.detach())


def test_one_shot_increments_hold_what_changed_since_the_full(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy="one_shot")
    ckpt.restore()
    for users in ([1], [2], [2, 3], [], [4]):
        step(training, ckpt, place, *users)
    ckpt.close(final=False)
    assert line(place)[1:] == [
        Stored(2, "increment", 1, 2, 1),
        Stored(3, "increment", 1, 2, 2),
        Stored(4, "increment", 1, 2, 2),
        Stored(5, "increment", 1, 2, 3),
    ]
    assert {m.policy for m in manifests(place)} == {"one_shot"}
    check_restores(place, training)


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_state_dict_may_look_rows_up(policy: str, place: Place) -> None:
    """It marks them, for increments that stand on a full in the bitmap that is copied."""
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy=policy)
    ckpt.restore()
    state = training.reader.state_dict

    def after_a_lookup() -> dict[str, Any]:
        training.model.users(torch.arange(ckpt.batches_done * 10))
        return state()

    training.reader.state_dict = after_a_lookup  # type: ignore[method-assign]
    for user in range(1, 5):
        step(training, ckpt, place, user)
    ckpt.close(final=False)
    assert ckpt.stats.failed == 0
    check_restores(place, training)


def test_full_every_starts_anew_for_one_shot(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy=OneShot(full_every=3))
    ckpt.restore()
    for user in range(7):
        step(training, ckpt, place, user)
    ckpt.close(final=False)
    found = line(place)
    assert [stored.kind for stored in found] == ["full", "increment", "increment"] * 2 + ["full"]
    assert [stored.parent for stored in found] == [None, 1, 1, None, 4, 4, None]
    assert [stored.rows for stored in found if stored.parent] == [1, 2, 1, 2]
    check_restores(place, training)


def test_intermittent_takes_a_full_when_the_predictor_says_so(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy="intermittent")
    ckpt.restore()
    for number in range(12):
        step(training, ckpt, place, *range(10 * number, 10 * number + 60))
    ckpt.close(final=False)
    found = manifests(place)
    full, sizes = 0, [0]
    for manifest in found:
        if sizes:
            expected = full + sum(sizes) <= (len(sizes) + 1) * sizes[-1]
            assert (manifest.kind == "full") == expected
        if manifest.kind == "full":
            full, sizes = manifest.stored_bytes, []
        else:
            sizes.append(manifest.stored_bytes)
            assert manifest.chain_length == 2
    assert 2 <= [manifest.kind for manifest in found].count("full") <= 6
    check_restores(place, training)


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_a_restart_goes_on_as_if_there_had_been_none(policy: str, place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy=policy)
    ckpt.restore()
    for user in (1, 2, 3):
        step(training, ckpt, place, user)
    ckpt.close(final=False)
    second = simple_training(9)
    again = checkpointer(second, place, interval_batches=1, policy=policy)
    again.restore()
    step(second, again, place, 7)
    again.close(final=False)
    assert line(place)[1:] == [
        Stored(2, "increment", 1, 2, 1),
        Stored(3, "increment", 1, 2, 2),
        Stored(4, "increment", 1, 2, 3),  # rows 2 and 3 of before, and 7
    ]
    check_restores(place, second)


def test_the_predictor_knows_what_was_stored_before_a_restart(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy="intermittent")
    ckpt.restore()
    for number in range(3):
        step(training, ckpt, place, *range(20 * number, 20 * number + 20))
    ckpt.close(final=False)
    second = simple_training(9)
    again = checkpointer(second, place, interval_batches=1, policy="intermittent")
    again.restore()
    history = pipeline_of(again)._ledger.base_history
    again.close(final=False)
    assert history is not None
    full, *increments = manifests(place)
    assert history.base == full.ref and history.base_bytes == full.stored_bytes
    assert history.known == Sizes.of(m.stored_bytes for m in increments)
    assert len(history) == 3


def test_a_change_of_policy_takes_over_the_chain(place: Place) -> None:
    training = simple_training()
    for policy, user in (
        ("consecutive", 1),
        ("consecutive", 2),
        ("one_shot", 3),
        ("continuous", 4),
        ("intermittent", 5),
    ):
        ckpt = checkpointer(training, place, interval_batches=1, policy=policy)
        ckpt.restore()
        step(training, ckpt, place, user)
        ckpt.close(final=False)
        check_restores(place, training)
    assert line(place)[1:] == [
        Stored(2, "increment", 1, 2, 1),  # 2
        Stored(3, "increment", 1, 2, 2),  # 2, 3
        Stored(4, "increment", 3, 3, 1),  # 4
        Stored(5, "increment", 1, 2, 4),  # 2, 3, 4, 5
    ]


def lose(training: Training, ckpt: Checkpointer, place: Place, *users: int) -> None:
    """One checkpoint that comes to nothing."""
    for user in users:
        look_up(training, user)
    before = ckpt.stats.staged, ckpt.stats.failed
    ckpt.step()
    until(lambda: ckpt.stats.staged == before[0] + 1)
    reject(StagedRun(place.run_directory).staged_jobs()[-1], "StagingError")
    until(lambda: ckpt.stats.failed == before[1] + 1)


def test_a_lost_cumulative_increment_costs_nothing(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy="one_shot")
    ckpt.restore()
    step(training, ckpt, place, 1)
    step(training, ckpt, place, 2)
    lose(training, ckpt, place, 3)
    step(training, ckpt, place, 4)
    ckpt.close(final=False)
    assert line(place)[1:] == [Stored(2, "increment", 1, 2, 1), Stored(4, "increment", 1, 2, 3)]
    check_restores(place, training)


def test_a_lost_full_gives_its_rows_back_and_its_predecessor_stands_again(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy=OneShot(full_every=3))
    ckpt.restore()
    for user in (1, 2, 3):
        step(training, ckpt, place, user)
    lose(training, ckpt, place, 4)  # a full
    step(training, ckpt, place, 5)  # is due again
    ckpt.close(final=False)
    assert [(stored.step, stored.kind) for stored in line(place)] == [
        (1, "full"),
        (2, "increment"),
        (3, "increment"),
        (5, "full"),
    ]
    check_restores(place, training)


def test_increments_on_a_full_that_is_lost(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, policy=OneShot(full_every=2), jobs=3)
    ckpt.restore()
    step(training, ckpt, place, 1)
    step(training, ckpt, place, 2)
    for user in (3, 4):  # a full, and an increment on it before its outcome is known
        look_up(training, user)
        ckpt.step()
    until(lambda: ckpt.stats.staged == 4)
    full, increment = StagedRun(place.run_directory).staged_jobs()
    assert job_files.read_job(full).kind == "full"
    job = job_files.read_job(increment)
    assert (job.kind, job.parent and job.parent.step, job.dirty_rows) == ("increment", 3, 1)
    written = full.read_bytes()
    full.write_bytes(
        written[: len(written) // 2]
    )  # damaged: the agent rejects it, and what stands on it
    place.persist_all()
    until(lambda: ckpt.stats.failed == 2)
    look_up(training, 5)
    ckpt.step()
    until(lambda: ckpt.stats.staged == 5)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 3)
    ckpt.close(final=False)
    assert line(place)[-1].step == 5
    check_restores(place, training)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_second_checkpoint_at_one_batch(policy: str, place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=10, policy=policy)
    ckpt.restore()
    with place.agent():
        train(training, ckpt, 1)
        assert ckpt.checkpoint() and not ckpt.checkpoint()
        until(lambda: ckpt.stats.committed == 1)
        train(training, ckpt, 1)
        assert ckpt.checkpoint() and not ckpt.checkpoint()
        until(lambda: ckpt.stats.committed == 2)
        ckpt.close()
    assert [stored.step for stored in line(place)] == [1, 2]

"""Which checkpoint a follower serves by its channel or pin, and how far behind it is."""

from __future__ import annotations

import pytest

from recpoint import Follower
from recpoint.errors import (
    NothingToRestore,
    NotServing,
)
from recpoint.format.naming import LEASE_KEY
from tests.followed_run import Trainer, require, validated
from tests.interposed_store import InterposedStore


def test_pins_to_an_older_version_and_back(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
        follower.poll()
    follower.pin(2)
    assert follower.poll()
    require(follower, trainer, 2)
    trainer.commit(4)
    assert not follower.poll()
    assert follower.status.pinned == 2 and follower.status.lag_checkpoints == 2
    follower.unpin()
    assert follower.poll()
    require(follower, trainer, 4)
    follower.pin(77)
    with pytest.raises(NothingToRestore, match="step 77"):
        follower.poll()
    require(follower, trainer, 4)
    assert follower.status.error and "step 77" in follower.status.error


def test_the_channel_of_validated_ones(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, channel="validated")
    made = [trainer.commit(step) for step in (1, 2, 3)]
    assert not follower.poll()
    with pytest.raises(NotServing), follower.reading():
        pass
    validated(trainer.run, made[1], "passed")
    assert follower.poll()
    require(follower, trainer, 2)


def test_lag_is_right_at_the_look_that_goes_back(trainer: Trainer) -> None:
    for step in (10, 20, 30, 40):
        trainer.commit(step)
    follower = Follower(trainer.run.url)
    follower.poll()
    follower.pin(20)
    assert follower.poll()
    first = follower.status
    assert (first.lag_checkpoints, first.lag_batches) == (2, 20)
    assert first.lag_seconds is not None and first.lag_seconds > 0
    assert not follower.poll()
    assert follower.status.lag_checkpoints == 2
    follower.unpin()
    assert follower.poll()
    assert (follower.status.lag_checkpoints, follower.status.lag_seconds) == (0, 0.0)


def test_only_what_is_ahead_counts_as_skipped(trainer: Trainer) -> None:
    for step in (10, 20, 30, 40, 50):
        trainer.commit(step)
    for number in (1, 2):
        validated(trainer.run, trainer.made[number], "passed")
    follower = Follower(trainer.run.url, channel="validated")
    for moved in (True, False):
        assert follower.poll() is moved
        status = follower.status
        assert follower.version == 30
        assert [one.name.step for one in status.skipped] == [50, 40]
    follower.pin(10)  # step 10 was not validated itself
    for _ in range(2):
        follower.poll()
        status = follower.status
        assert [one.name.step for one in status.skipped] == [50, 40]
        assert status.lag_checkpoints == 2


def test_a_pin_to_what_is_not_there_is_named(trainer: Trainer) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    for pinned in ((7, None), (1, 7)):
        follower.pin(*pinned)
        with pytest.raises(NothingToRestore, match="pinned to"):
            follower.poll()


def test_a_version_is_never_seen_with_the_lag_of_another(trainer: Trainer) -> None:
    """Requests are given a version before the lease of the move to it is released."""
    seen: list[tuple[int | None, int, bool]] = []

    def called(call: str, key: str) -> None:
        if call == "delete" and key.startswith(LEASE_KEY.prefix):
            status = follower.status
            assert bool(status.lag_seconds) == bool(follower.lag_seconds)
            seen.append((follower.version, status.lag_checkpoints, bool(status.lag_seconds)))

    follower = Follower(trainer.run.url)
    follower._store = InterposedStore(follower._store, before=called)
    for step in (1, 2):
        trainer.commit(step)
        assert follower.poll()
    follower.pin(1)
    assert follower.poll()
    follower.unpin()
    assert follower.poll()
    assert seen == [(1, 0, False), (2, 0, False), (1, 1, True), (2, 0, False)]

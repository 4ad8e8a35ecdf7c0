from __future__ import annotations

import os
from pathlib import Path

import pytest

from recpoint import Follower
from recpoint.catalog.check.check import check
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.retention.sweep import plan_sweep
from recpoint.catalog.run import pins
from recpoint.catalog.run.publications import (
    choose,
    newest_publication,
    publication_numbers,
    publish,
)
from recpoint.catalog.run.run import Run
from recpoint.errors import FormatError, NothingToRestore, ObjectNotFound, RetentionRefused
from recpoint.format.naming import MAX_PUBLICATION, PIN_KEY, PUBLICATION_KEY, ManifestName
from recpoint.format.record_kinds import PUBLICATION
from recpoint.format.records import pack_record
from tests.catalog_builder import new_run, tables
from tests.consolidation import name_of, spoil, trained
from tests.fault.retention_lives import retain_once


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trained(run, tables(), [1, 2, 3, 4])
    return run


def at(step: int) -> ManifestName:
    return ManifestName(step, 1)


def published_pins(run: Run) -> dict[int, tuple[str, ...]]:
    return {name.step: labels for name, labels in pins.pinned(run).items()}


def test_the_highest_number_counts_and_its_pin_moves(run: Run) -> None:
    assert newest_publication(run) is None
    first = publish(run, at(2), why="good")
    assert first.created and first.record.number == 1 and first.record.why == "good"
    assert published_pins(run) == {2: ("published-00000001",)}
    publish(run, at(4))
    back = publish(run, at(2), why="back")
    assert back.record.number == 3 and published_pins(run) == {2: ("published-00000003",)}
    found = newest_publication(run)
    assert found == back.record and publication_numbers(run) == [1, 2, 3]
    assert not publish(run, at(2)).created and publication_numbers(run) == [1, 2, 3]


@pytest.mark.parametrize("there", ["of another checkpoint", "damaged"])
def test_what_is_asked_for_is_published_whatever_a_pin_of_that_name_says(
    run: Run, there: str
) -> None:
    made = pins.pin(run, at(1), label="published-00000001")
    data = pack_record(made) if there == "of another checkpoint" else b"damaged"
    run.store.put(PIN_KEY.of(3, 1, "published-00000001"), data)
    done = publish(run, at(3), who="ana")
    assert done.record.checkpoint == run.manifest(3, 1).ref and done.record.who == "ana"
    assert newest_publication(run) == done.record
    assert published_pins(run) == {3: ("published-00000001",)}
    publish(run, at(4))
    assert published_pins(run) == {4: ("published-00000002",)}


def test_one_that_is_held_is_replaced_only_by_who_says_so(run: Run) -> None:
    publish(run, at(2), held=True)
    with pytest.raises(RetentionRefused, match="--release"):
        publish(run, at(4))
    assert not publish(run, at(2)).created
    assert publish(run, at(4), release=True).record.number == 2
    assert published_pins(run) == {4: ("published-00000002",)}
    publish(run, at(4), held=True)
    assert not publish(run, at(4), release=True, held=False).record.held


def test_what_a_validation_speaks_against_is_published_by_force_alone(run: Run) -> None:
    spoil(run, run.manifest(3, 1))
    for step in (3, 4):  # 4 needs 3
        with pytest.raises(RetentionRefused, match="validation 1") as refused:
            publish(run, at(step))
        assert f"recpoint validate {run.url} --step {step}" in refused.value.next_step
        assert "--force" in refused.value.next_step
    assert publication_numbers(run) == [] and published_pins(run) == {}
    done = publish(run, at(3), held=True, force=True)
    assert done.created and done.doubt == "validation 1 found wrong or damaged rows"
    with pytest.raises(RetentionRefused, match="validation 1"):
        publish(run, at(3), held=True)  # as it is, but no longer without a word
    with pytest.raises(RetentionRefused, match=r"held by .*; by now validation 1 found"):
        publish(run, at(2))
    assert publish(run, at(2), release=True).doubt is None


def test_retention_keeps_what_is_published_with_its_chain(run: Run) -> None:
    publish(run, at(2))
    trained(run, tables(seed=5), [9])
    for _ in range(2):
        retain_once(run, last=1)
    assert [name.step for name in run.manifest_names()] == [1, 2, 9]
    follower = Follower(run.url, channel="published")
    assert follower.poll() and follower.version == 2
    publish(run, at(9))
    for _ in range(2):
        retain_once(run, last=1)
    assert [name.step for name in run.manifest_names()] == [9]


def test_one_that_is_being_deleted_is_not_published(run: Run) -> None:
    trained(run, tables(seed=5), [9])
    with pytest.raises(ObjectNotFound):
        publish(run, at(7))
    policy = RetentionPolicy(keep_last=1, require_validated=False)
    retain_once(run, last=1)  # marks
    plan = plan_prune(run, policy, grace_seconds=0.0, grace_floor_seconds=0.0)
    assert plan.delete
    publish(run, at(4))  # between the plan and its execution
    execute(run, plan)
    assert {name.step for name in run.manifest_names()} >= {1, 2, 3, 4}


def test_chooses_the_newest_that_is_good(run: Run) -> None:
    assert choose(run, validated_only=False) == at(4)
    with pytest.raises(NothingToRestore, match="validated"):
        choose(run, validated_only=True)


def test_records_are_known_to_check_and_sweep_and_do_not_pile_up(run: Run) -> None:
    for number in range(104):
        publish(run, at(1 + number % 4))
    assert publication_numbers(run) == list(range(5, 105))
    assert len(pins.pinned(run)) == 1
    assert not [f for f in check(run).findings if "not an object of recpoint" in str(f)]
    assert plan_sweep(run, grace_seconds=0.0).unrecognised == ()


def test_a_damaged_record_changes_nothing_for_who_serves(run: Run) -> None:
    for step in (2, 3):
        publish(run, at(step))
    follower = Follower(run.url, channel="published")
    assert follower.poll() and follower.version == 3
    publish(run, at(4))
    run.store.put(PUBLICATION_KEY.of(3), b"{}")
    with pytest.raises(FormatError):
        follower.poll()
    assert follower.version == 3 and follower.status.error is not None
    fresh = Follower(run.url, channel="published")
    assert fresh.poll() and fresh.version == 3
    with pytest.raises(FormatError):
        run.records(PUBLICATION).read(3)
    with pytest.raises(FormatError, match="--release"):
        publish(run, at(2))  # what is damaged may have been held
    assert publish(run, at(2), release=True).record.number == 4
    assert fresh.poll() and fresh.version == 2
    record = newest_publication_bytes(run, 2)
    run.store.put(PUBLICATION_KEY.of(4), record)
    with pytest.raises(FormatError, match="the record of published/00000002"):
        newest_publication(run)


def newest_publication_bytes(run: Run, number: int) -> bytes:
    return run.store.get(PUBLICATION_KEY.of(number), max_bytes=1 << 20)


def test_numbers_that_have_run_out_leave_no_pin(run: Run) -> None:
    publish(run, at(2))
    before = published_pins(run)
    last = PUBLICATION_KEY.of(MAX_PUBLICATION)
    run.store.put(last, b"somebody else's")
    for step in (3, 4):
        with pytest.raises(RetentionRefused, match=last):
            publish(run, at(step), release=True)
    assert published_pins(run) == before
    run.store.delete(last)
    assert publish(run, at(3)).record.number == 2


def test_words_that_no_record_can_hold_are_recorded_as_far_as_they_go(run: Run) -> None:
    why = os.fsdecode(b"clicks \xff dropped")  # as a terminal hands it on
    assert publish(run, at(2), why=why).record.why == "clicks ? dropped"
    assert pins.pin(run, at(3), why=why).why == "clicks ? dropped"


def test_a_follower_goes_back_and_forth_with_publications(run: Run) -> None:
    follower = Follower(run.url, channel="published")
    assert not follower.poll()
    for step in (3, 2, 4):
        publish(run, at(step))
        assert follower.poll() and follower.version == step
        assert follower.lag_seconds == 0.0
        assert not follower.poll()
    # Committed and not published: nobody is told.
    trained(run, tables(seed=5), [9])
    assert not follower.poll() and follower.version == 4
    assert follower.status.lag_batches == 5


def test_a_published_checkpoint_that_is_damaged(run: Run) -> None:
    publish(run, at(2))
    (bad,) = trained(run, tables(seed=5), [9])
    publish(run, name_of(bad))
    run.store.delete(bad.chunks[0].key)
    fresh = Follower(run.url, channel="published")
    assert fresh.poll() and fresh.version == 2
    assert fresh.status.skipped[0].name.step == 9
    assert fresh.lag_seconds is not None and fresh.lag_seconds > 0

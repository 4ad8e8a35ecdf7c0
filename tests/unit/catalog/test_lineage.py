"""The live line as a function of generation records and manifest keys (format §5)."""

from __future__ import annotations

import pytest

from recpoint.catalog.run.lineage import live_line, restarts
from recpoint.errors import MalformedObject, MissingLink
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord


def record(generation: int, restored: tuple[int, int] | None = None) -> GenerationRecord:
    return GenerationRecord(
        run="0" * 32,
        generation=generation,
        token="1" * 32,
        restored=CheckpointRef(step=restored[0], generation=restored[1], attempt="2" * 32)
        if restored
        else None,
        host="host",
        pid=1,
        created_ms=0,
    )


def line(
    restored: dict[int, tuple[int, int] | None], names: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    records = {number: record(number, what) for number, what in restored.items()}
    found = live_line(max(restored, default=0), records, [ManifestName(*name) for name in names])
    return [(name.step, name.generation) for name in found]


def test_a_run_that_no_trainer_has_claimed_has_no_live_line() -> None:
    assert line({}, [(10, 1)]) == []


def test_all_manifests_of_a_single_generation_count_newest_first() -> None:
    assert line({1: None}, [(10, 1), (30, 1), (20, 1)]) == [(30, 1), (20, 1), (10, 1)]


def test_what_a_replaced_trainer_wrote_after_the_restored_step_does_not_count() -> None:
    names = [(10, 1), (20, 1), (30, 1), (25, 2)]
    assert line({1: None, 2: (20, 1)}, names) == [(25, 2), (20, 1), (10, 1)]


def test_a_roll_back_leaves_the_branch_it_goes_back_over() -> None:
    names = [(10, 1), (20, 1), (30, 1), (40, 2), (15, 3)]
    assert line({1: None, 2: (30, 1), 3: (10, 1)}, names) == [(15, 3), (10, 1)]


def test_a_trainer_that_starts_from_nothing_supersedes_everything_before() -> None:
    assert line({1: None, 2: None}, [(10, 1), (20, 1), (5, 2)]) == [(5, 2)]
    assert line({1: None, 2: None}, [(10, 1)]) == []


def test_generations_that_wrote_nothing_are_walked_through() -> None:
    restored: dict[int, tuple[int, int] | None] = {1: None, 2: (20, 1), 3: (20, 1)}
    assert line(restored, [(10, 1), (20, 1), (30, 2)]) == [(20, 1), (10, 1)]


def test_the_restored_checkpoint_may_have_been_removed() -> None:
    assert line({1: None, 2: (20, 1)}, [(10, 1), (30, 2)]) == [(30, 2), (10, 1)]


def test_of_two_checkpoints_of_one_step_the_newer_generations_counts() -> None:
    assert line({1: None, 2: (20, 1)}, [(10, 1), (20, 1), (20, 2)]) == [(20, 2), (10, 1)]


def test_a_checkpoint_below_the_step_its_trainer_restored_does_not_count() -> None:
    assert line({1: None, 2: (20, 1)}, [(20, 1), (15, 2)]) == [(20, 1)]


def test_a_bound_of_a_later_generation_still_holds_further_back() -> None:
    # 3 went back to step 10 of generation 2, which had restored step 20 of generation 1: whatever
    # generation 1 has above 10 is off the line, although 2 restored 20.
    names = [(5, 1), (20, 1), (10, 2)]
    assert line({1: None, 2: (20, 1), 3: (10, 2)}, names) == [(5, 1)]


def test_manifests_of_unknown_generations_do_not_count() -> None:
    assert line({1: None}, [(10, 1), (20, 7)]) == [(10, 1)]


def test_a_record_missing_on_the_way_is_named() -> None:
    with pytest.raises(MissingLink) as caught:
        live_line(2, {2: record(2, (10, 1))}, [])
    assert caught.value.subject == "generations/00000001.json"
    with pytest.raises(MissingLink, match=r"generations/00000003\.json"):
        live_line(3, {2: record(2, (10, 1))}, [])


def test_a_record_missing_beside_the_way_does_not_matter() -> None:
    assert live_line(3, {3: record(3, (10, 1)), 1: record(1)}, [ManifestName(10, 1)]) == [(10, 1)]


@pytest.mark.parametrize("restored", [2, 3])
def test_a_record_that_goes_on_from_itself_or_later_is_refused(restored: int) -> None:
    with pytest.raises(MalformedObject, match=r"generations/00000002\.json"):
        live_line(2, {2: record(2, (10, restored)), 3: record(3, (10, 2))}, [])


@pytest.mark.parametrize(
    ("restored", "count"),
    [
        ({1: None}, 0),
        ({1: None, 2: (10, 1)}, 1),
        ({1: None, 2: (10, 1), 3: (10, 1), 4: (20, 2)}, 3),  # the third's work was lost
        ({1: None, 2: (10, 1), 3: None}, 0),  # starting from nothing is another line
        ({1: None, 2: None, 3: (10, 2), 4: (20, 3)}, 2),
        ({2: (10, 1), 3: (20, 2)}, 2),  # the first cannot be read
        ({}, 0),
    ],
)
def test_restarts_since_the_line_began(
    restored: dict[int, tuple[int, int] | None], count: int
) -> None:
    records = {number: record(number, what) for number, what in restored.items()}
    assert restarts(max(restored, default=0), records) == count


def test_restarts_of_records_that_lie_in_a_circle() -> None:
    assert restarts(3, {3: record(3, (10, 3))}) == 0
    assert restarts(3, {3: record(3, (10, 2)), 2: record(2, (10, 3))}) == 1

"""What each rank has of its own comes back to it; what is stored once has to be alike on all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, dense_tensors, extra_states, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.fault.own_state_lives import (
    Unlike,
    exhausted_rank,
    failing_rank,
    own_state_life,
    told_of_start,
)
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS
from tests.training_builder import InlineAgent


def train(place: Path, job: int, ranks: int, unlike: Unlike) -> list[dict[str, Any]]:
    told = [place / f"told-{job}-{rank}" for rank in range(ranks)]
    lives = [
        ForkedProcess(
            target=own_state_life,
            args=(str(place), job, rank, ranks, unlike, str(told[rank])),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(PATIENCE_SECONDS)
        assert life.exitcode == 0
    return [json.loads(path.read_text()) for path in told]


def test_what_a_rank_has_of_its_own_comes_back_to_it(tmp_path: Path) -> None:
    with InlineAgent(tmp_path / "staging"):
        before = train(tmp_path, 1, 2, "buffers")
        again = train(tmp_path, 2, 2, "buffers")
        more = train(tmp_path, 3, 3, "buffers")
    for key in ("mean", "scale"):
        assert before[0]["ended"][key] != before[1]["ended"][key], key
    assert before[0]["ended"]["top"] == before[1]["ended"]["top"]
    assert [one["restored"] for one in again] == [2, 2]
    assert [one["begun"] for one in again] == [one["ended"] for one in before]
    # A rank that was not there has what rank 0 has.
    assert [one["restored"] for one in more] == [4, 4, 4]
    ended = [one["ended"] for one in again]
    assert [one["begun"] for one in more] == [*ended, ended[0]]
    # So has a process of which there is one.
    target = MemoryTarget()
    restore(Run.open(open_store(str(tmp_path / "run"))), target, Selection(step=4))
    assert dense_tensors(target.state)["norm.running_mean"].tolist() == ended[0]["mean"]
    assert extra_states(target.state) == {"scaled": {"scale": ended[0]["scale"]}}
    assert all(one["failed"][0] == 0 for one in (*before, *again, *more))


def test_tables_that_are_divided_by_hand_come_back_with_what_trains_them(tmp_path: Path) -> None:
    with InlineAgent(tmp_path / "staging"):
        before = train(tmp_path, 1, 2, "tables")
        again = train(tmp_path, 2, 2, "tables")
        more = train(tmp_path, 3, 3, "tables")
    for key in ("table", "table_steps"):
        assert [one["begun"][key] for one in again] == [one["ended"][key] for one in before]
    assert before[0]["ended"]["table"] != before[1]["ended"]["table"]
    assert [one["ended"]["table_steps"] for one in again] == [4.0, 4.0]
    # Another division is another model.
    assert "table 'items2' is not in the checkpoint" in more[2]["error"]
    assert all(one["error"].startswith("rank 2 of 3") for one in more[:2])


@pytest.mark.parametrize(("unlike", "name"), [("parameters", "top.weight"), ("a table", "users")])
def test_no_checkpoint_is_cut_of_what_is_stored_once_and_not_alike(
    tmp_path: Path, unlike: Unlike, name: str
) -> None:
    told = train(tmp_path, 1, 2, unlike)
    for count, error in (one["failed"] for one in told):
        assert count == 1 and f"{name!r}: found other values on rank 1 than on rank 0" in error
    assert Run.open(open_store(str(tmp_path / "run"))).manifest_names() == []


def test_a_rank_without_memory_to_tell_what_is_unlike_answers_all_the_same(
    tmp_path: Path,
) -> None:
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    lives = [
        ForkedProcess(target=exhausted_rank, args=(str(tmp_path), rank, str(told[rank])))
        for rank in range(2)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(PATIENCE_SECONDS)
        assert life.exitcode == 0
    for error, heard in (json.loads(path.read_text()) for path in told):
        assert "the model: found other values on rank 1 than on rank 0" in error
        assert heard == ["in step", "in step"]


@pytest.mark.parametrize(
    ("unlike", "said"),
    [
        ("names", "'top0.bias': found [1], torch.float32 on rank 0; none on rank 1"),
        ("buffer names", "the buffer 'seen0': found one on rank 0; none on rank 1"),
    ],
)
def test_what_one_rank_only_has_is_refused_by_name(
    tmp_path: Path, unlike: Unlike, said: str
) -> None:
    first, second = train(tmp_path, 1, 2, unlike)
    assert first == second and said in first["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("announce", [True, False])
def test_of_several_ranks_the_first_says_how_training_begins(
    tmp_path: Path, announce: bool
) -> None:
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    lives = [
        ForkedProcess(
            target=told_of_start, args=(str(tmp_path), rank, announce, str(said[rank])), daemon=True
        )
        for rank in range(2)
    ]
    with InlineAgent(tmp_path / "staging"):
        for life in lives:
            life.start()
        for life in lives:
            life.join(PATIENCE_SECONDS)
            assert life.exitcode == 0
    first, second = (path.read_text() for path in said)
    assert second == ""
    url = tmp_path / "run"
    begins = rf"recpoint: {url} begins: nothing is restored\n"
    restored = rf"recpoint: {url} is restored: step 1 \(.*\)\n"
    assert re.fullmatch(begins + restored if announce else "", first), first


def test_what_fails_on_one_rank_at_the_start_ends_all_of_them_at_once(tmp_path: Path) -> None:
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    lives = [
        ForkedProcess(target=failing_rank, args=(str(tmp_path), rank, str(told[rank])), daemon=True)
        for rank in range(2)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(PATIENCE_SECONDS)  # less than ranks wait for each other
        assert life.exitcode == 0
    first, second = (json.loads(path.read_text()) for path in told)
    expected = {
        "settings": ("SettingsError", "timeouts: found 'long'"),
        "tables": ("SettingsError", "table 'users': found a weight that requires gradients and is"),
        "state": ("SettingsError", "schedulers[0]: found a object without state_dict"),
        "anything": ("ZeroDivisionError", "no such state"),
    }
    assert first.keys() == second.keys() == expected.keys()
    for case, (kind, message) in expected.items():
        assert first[case][0] == "RankLost", first[case]
        assert first[case][1].startswith("rank 1 of 2: found an error while"), first[case]
        assert second[case][0] == kind and message in second[case][1], second[case]
        assert second[case][2:] == ["on rank 1 of 2"]

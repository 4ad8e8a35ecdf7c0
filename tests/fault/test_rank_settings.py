"""Policies and intervals with several ranks: what is stored, how often, and who talks when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from recpoint.format.manifest import Manifest
from recpoint.trainer_plugin.policy import PolicyName
from tests.fault.rank_jobs import WAITING, Life, RankJob, require_same_end
from tests.fault.rank_lives import BATCH, DIM, HIDDEN, ROWS
from tests.training_builder import InlineAgent

_RANKS, _HALF, _END = 2, 4, 8


def trained(place: Path, **settings: Any) -> tuple[Run, list[Life], list[Life]]:
    """Two lives of two ranks, the second from where the first has ended."""
    job = RankJob(place)
    with InlineAgent(job.staging):
        first, second = (
            job.train(_RANKS, end, settings=WAITING | settings) for end in (_HALF, _END)
        )
    for life in (*first, *second):
        assert life.exit_code == 0 and life.told["failed"] == 0
    assert {life.told["restored_state"] for life in second} == {first[0].told["state"]}
    return Run.open(open_store(job.url)), first, second


def manifests(run: Run) -> list[Manifest]:
    """Of the live line, oldest first; each of two ranks."""
    found = [run.manifest(*name) for name in reversed(run.live_line())]
    assert all(manifest.ranks == _RANKS for manifest in found)
    return found


@pytest.fixture(scope="module")
def consecutive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Life], list[Life]]:
    return trained(tmp_path_factory.mktemp("consecutive"))


def test_each_checkpoint_stands_on_the_one_before_and_holds_what_all_have_alike_once(
    consecutive: tuple[Run, list[Life], list[Life]],
) -> None:
    run, *lives = consecutive
    line = manifests(run)
    assert [(one.step, one.kind) for one in line] == [(2, "full")] + [
        (step, "increment") for step in (4, 6, 8)
    ]
    assert [one.parent for one in line[1:]] == [one.ref for one in line[:-1]]
    # Nothing is said between two due steps: before a cut, and after it.
    for life in (life for ranks in lives for life in ranks):
        assert [len(said) for said in life.told["exchanged"]] == [0, 2, 0, 2]
    users = [entry for entry in line[0].chunks if entry.table == 0]
    assert sum(entry.row_count or 0 for entry in users) == ROWS
    assert {entry.rank for entry in users} == {0}
    target = MemoryTarget()
    restore(run, target)
    dense = (2 * DIM + 1) * HIDDEN + HIDDEN + 1
    # Layers, and Adam's two moments of each; steps of one value, and the replicated table's own.
    stored = {rank: dense_bytes(tree) for rank, tree in target.state.items()}
    assert stored == {0: 4 * (3 * dense + 4 + 1), 1: 0}


def dense_bytes(tree: Any) -> int:
    """Of a rank's state tree: tensors of the model and of its optimizers."""
    values = list(tree["model"]["tensors"].values())
    for optimizer in tree["optimizers"]:
        for entry in optimizer["state"].values():
            values += entry["values"].values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_a_cumulative_policy_ends_where_the_consecutive_one_does(
    policy: PolicyName, tmp_path: Path, consecutive: tuple[Run, list[Life], list[Life]]
) -> None:
    run, _, second = trained(tmp_path, policy=policy)
    require_same_end(second, consecutive[2])
    line = manifests(run)
    assert [one.step for one in line] == [2, 4, 6, 8] and line[0].kind == "full"
    assert all(one.parent == one.base for one in line[1:])
    fulls = [one for one in line if one.kind == "full"]
    assert policy == "intermittent" or len(fulls) == 1


def test_an_interval_in_seconds_is_rank_0s(
    tmp_path: Path, consecutive: tuple[Run, list[Life], list[Life]]
) -> None:
    # Any batch takes longer than this.
    run, *lives = trained(tmp_path, interval_batches=None, interval_seconds=0.001)
    for one, other in lives:
        assert one.told["exchanged"] == other.told["exchanged"]
        assert any("the interval" in said for said in one.told["exchanged"])
    line = manifests(run)
    assert len(line) > 2 and {_HALF, _END} <= {one.step for one in line}
    require_same_end(lives[1], consecutive[2])


def test_a_new_line_without_a_checkpoint_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    job = RankJob(tmp_path)
    with InlineAgent(job.staging):
        job.train(_RANKS, _HALF, settings=WAITING)
        job.train(_RANKS, 1, restoring={"fresh": True}, stop_at=1)
        first, second = job.train(_RANKS, _END, settings=WAITING)
        assert first.exit_code != 0 and second.exit_code != 0
        told = "2 superseded, the newest step 4 (generation 1)"
        assert told in first.told["refused"] and told in second.told["lost"]
        run = Run.open(open_store(job.url))
        assert run.generation_numbers() == [1, 2]
        named = {"step": _HALF, "generation": 1}
        lives = job.train(_RANKS, _END, settings=WAITING, restoring=named)
    assert [(life.exit_code, life.told["restored"]) for life in lives] == [(0, _HALF)] * _RANKS
    assert [(name.step, name.generation) for name in run.live_line()] == [
        (8, 3), (6, 3), (4, 1), (2, 1)
    ]  # fmt: skip


def test_a_validated_checkpoint_that_is_near_goes_first_on_all_ranks(tmp_path: Path) -> None:
    job = RankJob(tmp_path)
    with InlineAgent(job.staging):
        job.train(_RANKS, _HALF, settings=WAITING)
        run = Run.open(open_store(job.url))
        newest, older = run.live_line()
        record(run, validate(run, older))
        within = {"validated_within": newest.step - older.step}
        lives = job.train(_RANKS, _HALF, settings=WAITING, restoring=within)
    assert [(life.exit_code, life.told["restored"]) for life in lives] == [(0, older.step)] * _RANKS


@pytest.mark.nightly("loops")
def test_tables_get_more_rows_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A replicated table, and one of which ranks hold other rows than before."""
    more_rows, rule = 25, Uniform(seed=3)
    grow = {"grow": dict.fromkeys(("users", "items"), rule)}
    job = RankJob(tmp_path)
    with InlineAgent(job.staging):
        lives = [job.train(2, _HALF, settings=WAITING)]
        for end in (_END, _END + 2):
            lives.append(job.train(3, end, more_rows=more_rows, settings=WAITING | grow))
    assert all(rank.exit_code == 0 for life in lives for rank in life)
    # The second start finds all rows.
    assert lives[2][0].told["restored_state"] == lives[1][0].told["state"]
    run = Run.open(open_store(job.url))
    line = [run.manifest(*name) for name in reversed(run.live_line())]
    assert [(one.step, one.ranks, one.kind) for one in line] == [
        (2, 2, "full"),
        (4, 2, "increment"),
        (6, 3, "full"),
        (8, 3, "increment"),
        (10, 3, "increment"),
    ]
    before, after = MemoryTarget(), MemoryTarget()
    restore(run, before, Selection(step=4))
    restore(run, after, Selection(step=6))
    for name, table in before.tables.items():
        rows, grown = len(table.values), after.tables[name]
        new_values = rule(name, torch.arange(rows, rows + more_rows), DIM, torch.float32)
        assert torch.equal(grown.values[rows:], new_values)
        (old_sums,), (sums,) = table.row_states, grown.row_states
        assert old_sums is not None and sums is not None
        assert not sums[rows:].any()
        is_changed = (grown.values[:rows] != table.values).any(1)
        assert 0 < int(is_changed.sum()) <= 2 * 3 * BATCH < rows
        assert torch.equal(sums[:rows][~is_changed], old_sums[~is_changed])

"""Several trainers share rows: results are those of trainers that have whole tables."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from recpoint import Lookahead
from recpoint.embeddings.cache.install import cached, read_rows
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.home.initial import Uniform
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from recpoint.errors import HomeError, RankLost, SettingsError
from tests.cached_training import Batches, as_bits, cached_model
from tests.several_trainers import Case, alone, given_to, join, on_ranks, run_ranks

AMPLE = {"users": 203, "items": 101}

CASES = {
    2: {
        "adagrad": Case(servers=2, lr_factor=0.9),
        "sparse adam": Case(optimizer="adam", lr_factor=0.9),
        "dense sgd, mean, padding": Case(
            optimizer="sgd", sparse=False, mode="mean", padding=3, lr_factor=0.9
        ),
        "dense adagrad, weighted": Case(sparse=False, weighted=True),
        "copied tables": Case(is_meta=False),
        "several batches a step": Case(batches_a_step=3, slots={"users": 120, "items": 100}),
    },
    3: {
        "sgd, a window beyond the epoch": Case(optimizer="sgd", slots=AMPLE, window=30),
        "dense adagrad, max": Case(sparse=False, mode="max", slots={"users": 30, "items": 60}),
    },
}
#: Each process of it imports TorchRec, which takes longer than all others together.
TORCHREC: dict[str, Case] = {}
if find_spec("torchrec") and find_spec("fbgemm_gpu"):
    TORCHREC["row-wise adagrad"] = Case(optimizer="row-wise adagrad", sparse=False, lr_factor=0.9)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        *CASES.items(),
        # `test_cached_training` has this optimizer, `CASES` have optimizers whose state is a row.
        pytest.param(2, TORCHREC, marks=pytest.mark.nightly("loops")),
    ],
    ids=["2", "3", "2 with TorchRec"],
)
def test_results_are_those_of_whole_tables(
    ranks: int, cases: dict[str, Case], tmp_path: Path
) -> None:
    found = on_ranks(list(cases.values()), ranks, tmp_path / "ranks")
    for (name, case), one in zip(cases.items(), found, strict=True):
        expected = alone(case, ranks)
        assert one.rows.differences(expected.rows) == [], name
        assert torch.equal(as_bits(one.dense), as_bits(expected.dense)), name
        assert one.losses == expected.losses, name
        assert one.stats["misses"] == 0 and one.stats["unplanned"] == 0, name
        assert 0 < one.stats["reduced_at_once"] < one.stats["reduced_rows"], name
        assert one.stats["hits"] > 0 and one.stats["fetched_rows"] > 0, name


def test_what_ranks_cannot_share_is_refused_on_all_of_them(tmp_path: Path) -> None:
    codes, logs = run_ranks(__name__, 2, tmp_path / "ranks", "")
    assert codes == [0, 0], "\n".join(logs)
    said = [json.loads((tmp_path / "ranks" / f"said-{rank}").read_text()) for rank in (0, 1)]
    for one in said:
        assert "expected one home that all ranks share" in one["a home of its own"]
        assert "other values in them, on ranks [1]" in one["other values"]
        assert "a lookup of rows that are not in the ids of the batch" in one["not planned"]
        assert "or after a step with it" in one["after the step"]
        assert "no further batch on ranks [1]" in one["uneven"]
        assert "a reset of rows" in one["reset"]
        assert one["read"] is True
        assert one["groups"] == 1
        assert "at least 9" in one["too few slots"]


def test_a_restore_that_fails_on_a_rank_ends_on_all_and_may_be_tried_again(tmp_path: Path) -> None:
    codes, logs = run_ranks(__name__, 2, tmp_path / "ranks", "restore")
    assert codes == [0, 0], "\n".join(logs)


# What each rank does.


def _refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        act()
    return str(caught.value)


def _rank(directory: Path, rank: int, ranks: int) -> None:
    join(directory, rank, ranks)
    said: dict[str, Any] = {}
    table = nn.ModuleDict({"users": nn.Embedding(40, 4, sparse=True)})
    said["a home of its own"] = _refusal(lambda: cached(table, local(), 10))
    with servers(count=1) as home:
        torch.manual_seed(rank)
        differing = nn.ModuleDict({"others": nn.Embedding(40, 4, sparse=True)})
        said["other values"] = _refusal(lambda: cached(differing, home, 10))

        model, cache = cached_model({"users": 40, "items": 60}, home, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = Batches(4 - rank, seed=rank)
        reader = iter(Lookahead(batches, model, window=2))
        batch = next(reader)
        unplanned = {**batch, "users": (batch["users"] + 100) % 203}
        said["not planned"] = _refusal(lambda: model(unplanned))
        model(batch).sum().backward()
        optimizer.step()
        said["after the step"] = _refusal(lambda: model({**batch, "users": torch.arange(8)}))
        optimizer.zero_grad()
        said["reset"] = _refusal(lambda: cache.zero_rows("users", torch.tensor([1])))
        read = [read_rows(model, "users", ids=torch.arange(203))["values"] for _ in range(2)]
        said["read"] = torch.equal(*read)

        def to_the_end() -> None:
            for batch in reader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

        said["uneven"] = _refusal(to_the_end)
        cache.close()
        cache.close()
        said["groups"] = len(dist.distributed_c10d._world.pg_map)  # of torch.distributed
    with servers(count=1) as home:
        few = nn.ModuleDict({"users": nn.Embedding(40, 4, sparse=True, device="meta")})
        cached(few, home, 8 + rank, initial=Uniform(seed=0, low=0.0, high=1.0))
        ids = {"users": torch.arange(9) + 9 * rank}
        reader = iter(Lookahead(Listed([ids]), few, window=2))
        said["too few slots"] = _refusal(lambda: next(reader))
    (directory / f"said-{rank}").write_text(json.dumps(said))
    dist.destroy_process_group()


def _restoring_rank(directory: Path, rank: int, ranks: int) -> None:
    join(directory, rank, ranks)
    with servers(count=2, parity=Parity(data=1), timeout_seconds=5.0) as home:
        assert isinstance(home, ServedHome)
        model, cache = cached_model({"users": 40, "items": 60}, home, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in Lookahead(Batches(2, seed=rank), model, window=2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        read_rows(model, "users", ids=torch.arange(203))  # the home has the rows
        python = sys.executable
        if rank == 0:
            sys.executable = "/bin/false"  # no server starts again
            pids = [one.pid for one in home.greetings]
            for pid in (psutil.Process(pids[0]).ppid(), *pids):  # also what forks servers
                os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankLost if rank else HomeError) as caught:
            cache.restored()
        assert rank or "an end with exit status 1" in str(caught.value)
        assert time.monotonic() - began < 60.0  # gloo would wait for half an hour
        sys.executable = python
        dist.barrier()
        cache.restored()
        cache.close()
    dist.destroy_process_group()


class Listed:
    """A reader of given batches."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is stored."""


if __name__ == "__main__":
    given = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    (_restoring_rank if given_to(given[0]) == "restore" else _rank)(*given)

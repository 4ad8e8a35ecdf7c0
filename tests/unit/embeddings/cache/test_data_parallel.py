"""DistributedDataParallel trains the dense layers of a model whose tables ranks share."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recpoint import Lookahead
from recpoint.embeddings import clip_grad_norm_
from recpoint.embeddings.cache.install import cached
from recpoint.embeddings.server.processes import servers
from recpoint.errors import RanksDiffer, SettingsError
from tests.cached_training import Batches, as_bits, cached_model, plain_model, rows_of_plain
from tests.several_trainers import (
    Case,
    Found,
    alone,
    given_to,
    join,
    on_ranks,
    optimizers_of,
    run_ranks,
)
from tests.training_builder import Place

CASES = (
    Case(wrapped=True, servers=2),
    Case(wrapped=True, sparse=False, mode="mean", padding=3, window=30),
)


def test_results_are_those_of_ddp_with_whole_tables(tmp_path: Path) -> None:
    found = on_ranks(CASES, 2, tmp_path / "shared")
    codes, logs = run_ranks(__name__, 2, tmp_path / "whole", "")
    assert codes == [0, 0], "\n".join(logs)
    whole = torch.load(tmp_path / "whole" / "found.pt", weights_only=False)
    for case, one, of_ddp in zip(CASES, found, whole, strict=True):
        # Two summands have one sum, in whichever order torch adds them.
        for expected in (of_ddp, alone(case, 2)):
            assert one.rows.differences(expected.rows) == []
            assert torch.equal(as_bits(one.dense), as_bits(expected.dense))
            assert one.losses == expected.losses


@pytest.mark.nightly("loops")
def test_a_wrapped_model_goes_on_from_a_checkpoint_of_a_bare_one(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    bare = Case(run=place.run, staging=str(place.staging), batches=11)
    wrapped = replace(bare, wrapped=True, batches=22)
    with place.agent():
        on_ranks([bare], 2, tmp_path / "bare")
        (found,) = on_ranks([wrapped], 2, tmp_path / "wrapped")
        only = replace(bare, batches=0)
        (restored,) = on_ranks([only], 2, tmp_path / "restored")
    expected = alone(wrapped, 2)
    for one in (found, restored):
        assert one.rows.differences(expected.rows) == []
        assert torch.equal(as_bits(one.dense), as_bits(expected.dense))
    assert found.losses == expected.losses[11:]


def test_what_would_average_slots_is_refused(tmp_path: Path) -> None:
    codes, logs = run_ranks(__name__, 2, tmp_path / "ranks", "refused")
    assert codes == [0, 0], "\n".join(logs)
    for rank in (0, 1):
        said = json.loads((tmp_path / "ranks" / f"said-{rank}").read_text())
        assert "call cached() first" in said["wrapped before"]
        assert "a module that contains the model given to cached()" in said["a module around it"]
        assert "recpoint.embeddings.clip_grad_norm_()" in said["clipped by torch"]
        assert said["replicas"] is True


# What each rank does.


def _whole(case: Case, rank: int) -> Found:
    model = plain_model(sparse=case.sparse, mode=case.mode, padding=case.padding)
    trained = DistributedDataParallel(model)
    optimizers = optimizers_of(case, model)
    reader, losses = Batches(case.epoch, seed=rank), []
    for number in range(case.batches):
        batch = reader.batch(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(trained(batch), batch["target"])
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    return Found(rows_of_plain(model, optimizers[0]), model.top.weight.detach(), losses)


def _refused() -> dict[str, Any]:
    said: dict[str, Any] = {}
    with servers(count=1) as home:
        before = DistributedDataParallel(nn.ModuleDict({"users": nn.Embedding(40, 4)}))
        with pytest.raises(SettingsError) as caught:
            cached(before, home, 10)
        said["wrapped before"] = str(caught.value)
        model, cache = cached_model({"users": 40, "items": 60}, home)
        around = DistributedDataParallel(nn.Sequential(model))
        with pytest.raises(SettingsError) as caught:
            around(Batches(4).batch(0))
        said["a module around it"] = str(caught.value)
        trained = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reader = iter(Lookahead(Batches(8, seed=dist.get_rank()), model, window=3))
        with trained.no_sync():  # each rank has gradients of its own, and the tables' are averaged
            trained(next(reader)).sum().backward()
        tables = torch.optim.SGD([model.users.weight, model.items.weight], lr=0.1)
        tables.step()
        optimizer.zero_grad()
        for clip in (clip_grad_norm_, clip_grad_norm_, nn.utils.clip_grad_norm_):
            trained(next(reader)).sum().backward()
            clip(model.parameters(), 0.01)
            if clip is nn.utils.clip_grad_norm_:
                with pytest.raises(RanksDiffer) as differing:
                    optimizer.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
        said["clipped by torch"] = str(differing.value)
        every = [torch.empty_like(model.top.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(every, model.top.weight.detach())
        said["replicas"] = all(torch.equal(one, every[0]) for one in every)
        cache.close()
    return said


def _rank(directory: Path, rank: int, ranks: int) -> None:
    join(directory, rank, ranks)
    if given_to(directory) == "refused":
        (directory / f"said-{rank}").write_text(json.dumps(_refused()))
    else:
        found = [_whole(case, rank) for case in CASES]
        if rank == 0:
            torch.save(found, directory / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # By the module's name, by which what it writes can be read again.
    from tests.unit.embeddings.cache.test_data_parallel import _rank as rank_of_module

    rank_of_module(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

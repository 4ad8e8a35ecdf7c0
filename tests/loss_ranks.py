"""Trains on two ranks, with widths by a measured loss, and tells what each rank has measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from recpoint import Checkpointer, Loss, Options, Precision, Staging, Timeouts
from recpoint.catalog.persist import persist
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import RanksMissing, SettingsError
from tests.polling import until
from tests.training_builder import seed_everything

__all__ = ["BATCH", "INTERVAL", "ROWS", "loss_ranks"]

ROWS, DIM, BATCH, INTERVAL = 600, 8, 64, 10

Batch = tuple[Tensor, Tensor]


class Clicker(nn.Module):
    """A table, batch norm and dropout."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=sparse)
        self.norm = nn.BatchNorm1d(DIM)
        self.layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(DIM, 1))

    def forward(self, items: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.norm(self.items(items))).squeeze(1)
        return scores


class RankClicks:
    """An endless reader of clicks, other ones on each rank."""

    def __init__(self, rank: int) -> None:
        self.position, self._rank = 0, rank

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        chance = torch.Generator().manual_seed(2 * self.position + self._rank)
        self.position += 1
        items = (ROWS * torch.rand(BATCH, 3, generator=chance) ** 4).long()
        odds = (items % 5 < 2).float().sum(1) - 1.0
        return items, (torch.rand(BATCH, generator=chance) < odds.sigmoid()).float()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a batch, of a model that exchanges nothing with other ranks."""
    assert not isinstance(model, DistributedDataParallel)
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _own_loop(ckpt: Checkpointer, reader: RankClicks, total: int, stride: int) -> Iterator[Batch]:
    """Yield batches of a loop that calls `step` itself, and hands over one of each `stride`."""
    while ckpt.batches_done < total:
        batch = next(reader)
        if ckpt.batches_done % stride == 0:
            ckpt.measure(batch)
        yield batch
        ckpt.step()


def _trained(
    folder: Path, bits: Any, *, sgd: bool = False, batches: int = 80, own_stride: int = 0
) -> dict[str, Any]:
    """Train with checkpoints, and return what the rank has then."""
    seed_everything(1)
    rank = dist.get_rank()
    model = DistributedDataParallel(Clicker(sparse=sgd))
    kind = torch.optim.SGD if sgd else torch.optim.Adagrad
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.5 if sgd else 0.05)
    reader = RankClicks(rank)
    ckpt = Checkpointer(
        model,
        optimizer,
        reader=reader,
        bits=bits,
        run=str(folder / "run"),
        interval_batches=INTERVAL,
        staging=Staging(directory=str(folder / "staging")),
        timeouts=Timeouts(close_seconds=60.0, drain_seconds=60.0, ranks_seconds=90.0),
        options=Options(handle_sigterm=False, announce=False, on_error="raise"),
    )
    results: dict[str, Any] = {"states": []}
    meter = ckpt._parts.loss
    if meter is not None:
        seconds = itertools.count()
        meter._pace.clock = lambda: float(next(seconds))
    ckpt.restore()
    for total in range(INTERVAL, batches + 1, INTERVAL):
        for batch in (
            _own_loop(ckpt, reader, total, own_stride) if own_stride else ckpt.batches(total=total)
        ):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]).backward()
            optimizer.step()
        _persist(ckpt, folder, total // INTERVAL)
        if meter is not None:
            results["states"].append(meter.state_dict()["search"])
    if meter is not None:
        results["figures"] = ckpt.stats.loss
        results["record"] = meter.record
        results["stride"] = meter._pace.stride
        results["counts"] = {key: counts.codes for key, counts in meter._counts.items()}
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    results["trained"] = trained | {"generator": torch.get_rng_state()}
    ckpt.close(final=False)
    return results


def _persist(ckpt: Checkpointer, folder: Path, count: int) -> None:
    """Persist the jobs of all ranks, and wait until this rank hears of so many checkpoints."""
    dist.barrier()
    if dist.get_rank() == 0:
        staged = StagedRun.of(folder / "staging", str(folder / "run"))
        until(lambda: len(staged.staged_jobs()) == dist.get_world_size())
        while paths := staged.staged_jobs():
            for path in paths:
                with suppress(RanksMissing):  # until the last part
                    persist.persist_job(path)
    dist.barrier()
    until(lambda: ckpt.stats.committed == count)


def _by_loss(**settings: Any) -> Precision:
    loss = Loss(**{"increase": 1e-3, "of": loss_of, "share": 0.5, **settings})
    return Precision(bits=loss, small_table_values=0)


def _differences(exact: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Return the names of tensors that training has left with other bits if it was measured."""
    return [
        name
        for name, tensor in exact["trained"].items()
        if not torch.equal(tensor, measured["trained"][name])
    ]


def _measured(folder: Path) -> dict[str, Any]:
    exact = _trained(folder / "lossless", "lossless")
    results = _trained(folder / "loss", _by_loss())
    return results | {"changed_by_measuring": _differences(exact, results)}


def _counted(folder: Path) -> dict[str, Any]:
    exact = _trained(folder / "lossless", "lossless", sgd=True, batches=2 * INTERVAL)
    results = _trained(folder / "loss", _by_loss(), sgd=True, batches=2 * INTERVAL)
    return results | {"changed_by_measuring": _differences(exact, results)}


def _alone(folder: Path) -> dict[str, Any]:
    exact = _trained(folder / "lossless", "lossless", batches=3 * INTERVAL)
    results = _trained(folder / "loss", _by_loss(), batches=3 * INTERVAL)
    return results | {"changed_by_measuring": _differences(exact, results)}


def _stepped(folder: Path) -> dict[str, Any]:
    return _stepped_by(folder, stride=1)


def _stepped_unequally(folder: Path) -> dict[str, Any]:
    """Hand all batches over on rank 0, and one of three on rank 1."""
    return _stepped_by(folder, stride=1 + 2 * dist.get_rank())


def _stepped_by(folder: Path, *, stride: int) -> dict[str, Any]:
    exact = _trained(folder / "lossless", "lossless", batches=3 * INTERVAL, own_stride=stride)
    results = _trained(folder / "loss", _by_loss(), batches=3 * INTERVAL, own_stride=stride)
    return results | {"changed_by_measuring": _differences(exact, results)}


def _error_on_one(folder: Path) -> dict[str, Any]:
    calls = itertools.count()

    def of(model: nn.Module, batch: Batch) -> Tensor:
        if dist.get_rank() == 1 and next(calls) > 3 * 5:
            raise MemoryError("no memory")
        return loss_of(model, batch)

    return _trained(folder, _by_loss(of=of), batches=4 * INTERVAL)


def _refused(folder: Path) -> dict[str, Any]:
    def refusal(model: nn.Module, bits: Any) -> str:
        try:
            Checkpointer(
                model,
                torch.optim.Adagrad(model.parameters()),
                reader=RankClicks(dist.get_rank()),
                bits=bits,
                run=str(folder / "run"),
                interval_batches=INTERVAL,
                staging=Staging(directory=str(folder / "staging")),
            )
        except SettingsError as error:
            return str(error)
        return "not refused"

    rank = dist.get_rank()
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(Clicker(sparse=False))
    inner = Clicker(sparse=False)
    inner.layers = DistributedDataParallel(inner.layers)  # type: ignore[assignment]
    own = Clicker(sparse=False)
    own.add_module(f"rank_{rank}", nn.Embedding(50, DIM))
    return {
        "other increase": refusal(Clicker(sparse=False), _by_loss(increase=1e-3 * (1 + rank))),
        "SyncBatchNorm": refusal(synchronized, _by_loss()),
        "DistributedDataParallel": refusal(inner, _by_loss()),
        "own table": refusal(own, _by_loss()),
    }


_CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "measured": _measured,
    "counted": _counted,
    "alone": _alone,
    "own loop": _stepped,
    "unequal calls": _stepped_unequally,
    "error on one": _error_on_one,
    "refused": _refused,
}


def loss_ranks(folder: str, rank: int, cases: list[str], count: int = 2) -> None:
    """Be one of the ranks; tell in the file `told-<rank>` what came of each case."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    met = f"file://{folder}/met"
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=count)
    results = {case: _CASES[case](Path(folder) / case) for case in cases}
    torch.save(results, Path(folder) / f"told-{rank}")
    dist.destroy_process_group()

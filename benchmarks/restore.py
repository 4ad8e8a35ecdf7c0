"""Restoring a full and a chain of eight, against `torch.load` and DCP from the same S3 server.

One model, Adagrad state included, with the same contents in all four places. Each reader starts
from the store and ends with the values in the tensors of a model and its optimizers. DCP and
`torch.load` verify nothing; recpoint checks the digest of every byte it reads.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.report import Report, alternate, median_ratio
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.catalog.restore import MemoryTarget, RestoreReport, TableTarget, restore
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["run"]

_DIM = 16
_INCREMENTS = 7
_DIRTY_SHARE = 0.26  # of the rows, each interval: Check-N-Run's fleet


class _InPlace:
    """Restores into a model's own tensors, as a trainer does."""

    def __init__(self, model: Tables, optimizers: list[torch.optim.Optimizer]) -> None:
        self.targets = []
        for index in range(len(model.tables)):
            weight = model.table(index).weight
            state = optimizers[0].state[weight]["sum"]
            self.targets.append(TableTarget(values=weight.data, row_states=(state,)))
        self.state: dict[int, object] = {}

    def begin(self, manifest: Manifest) -> list[TableTarget | None]:
        """The model's tables."""
        return [*self.targets]

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """The dense layers: here only to show that they came."""
        self.state = state


def run(*, quick: bool) -> Report:
    """Measure it."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    rows = 200_000 if quick else 2_000_000
    rounds = 2 if quick else 5
    model = Tables(count=2, rows=rows, dim=_DIM)
    optimizers = model.optimizers(state=True)
    with (
        scratch(in_memory=False) as disk,
        scratch() as memory,
        SeaweedServer(disk / "weed") as server,
    ):
        os.environ.update(server.environment())
        full, chain = server.run_url(), server.run_url()
        _write_chain(model, optimizers, chain, memory / "chain")
        with staged_run(model, optimizers, url=full, staging=memory / "full") as tracked:
            tracked.cut_and_persist()
        peers = f"s3://{server.bucket}/peers"
        return _compare(model, optimizers, full, chain, peers, rounds)


def _write_chain(
    model: Tables, optimizers: list[torch.optim.Optimizer], url: str, staging: Path
) -> None:
    rows = model.table(0).num_embeddings
    generator = torch.Generator().manual_seed(3)
    with staged_run(model, optimizers, url=url, staging=staging) as tracked:
        tracked.cut_and_persist()
        for _ in range(_INCREMENTS):
            ids = torch.randperm(rows, generator=generator)[: int(rows * _DIRTY_SHARE)]
            for index in range(len(model.tables)):
                model.top(model.table(index)(ids)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tracked.checkpointer.step()
            tracked.cut_and_persist()


def _compare(
    model: Tables,
    optimizers: list[torch.optim.Optimizer],
    full: str,
    chain: str,
    peers: str,
    rounds: int,
) -> Report:
    filesystem = _s3()
    truth = {key: value.detach() for key, value in _contents(model, optimizers).items()}
    with filesystem.open(f"{peers}/model.pt", "wb", block_size=16 << 20) as file:
        torch.save(truth, file)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: as meant
    state_dict_saver.save(truth, storage_writer=FsspecWriter(f"{peers}/dcp"), no_dist=True)
    reports: dict[str, RestoreReport] = {}

    def from_recpoint(url: str) -> Callable[[], None]:
        store = open_store(url)  # connected once, as the peers' file system is

        def read() -> None:
            target = _InPlace(model, optimizers)
            reports[url] = restore(Run.open(store), target)

        return read

    def from_torch() -> None:
        with filesystem.open(f"{peers}/model.pt", "rb", block_size=16 << 20) as file:
            _load(model, optimizers, torch.load(file, weights_only=True))

    def from_dcp() -> None:
        contents = _contents(model, optimizers)  # the live tensors: DCP loads in place
        state_dict_loader.load(contents, storage_reader=FsspecReader(f"{peers}/dcp"), no_dist=True)

    readers = [from_recpoint(full), from_recpoint(chain), from_torch, from_dcp]
    names = ["recpoint, a full", f"recpoint, a chain of {_INCREMENTS + 1}", "torch.load", "DCP"]
    # The gate: each of them brings back exactly what was saved.
    saved = {key: value.clone() for key, value in truth.items()}
    for name, read in zip(names, readers, strict=True):
        for value in truth.values():
            value.fill_(-1.0)
        read()
        found = _contents(model, optimizers)
        if not all(torch.equal(saved[key], found[key]) for key in saved):
            raise RuntimeError(f"{name} did not bring back what was saved")
    seconds = alternate(rounds, *readers)
    report = Report(name="restore", columns=("from", "MB read", "s", "MB/s of state"))
    state_mb = sum(value.nbytes for value in truth.values()) / 1e6
    read_mb = [reports[full].bytes_read / 1e6, reports[chain].bytes_read / 1e6, state_mb, state_mb]
    for name, megabytes, taken in zip(names, read_mb, seconds, strict=True):
        median = statistics.median(taken)
        report.rows.append((name, megabytes, median, state_mb / median))
    report.figures = {
        "vs_torch_load": median_ratio(seconds[0], seconds[2]),
        "vs_dcp": median_ratio(seconds[0], seconds[3]),
        "chain8_vs_full": median_ratio(seconds[1], seconds[0]),
    }
    report.notes.append("vs_*: seconds of recpoint's full over the peer's; below 1 is faster")
    _check_memory_target(full, saved)
    return report


def _contents(model: Tables, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Tables and their row state; the dense layers are a millionth of the bytes."""
    contents: dict[str, torch.Tensor] = {}
    for index in range(len(model.tables)):
        weight = model.table(index).weight
        contents[f"tables.{index}.weight"] = weight
        contents[f"tables.{index}.sum"] = optimizers[0].state[weight]["sum"]
    return contents


def _load(
    model: Tables, optimizers: list[torch.optim.Optimizer], loaded: dict[str, torch.Tensor]
) -> None:
    for key, tensor in _contents(model, optimizers).items():
        tensor.data.copy_(loaded[key])


def _check_memory_target(url: str, saved: dict[str, torch.Tensor]) -> None:
    target = MemoryTarget()
    restore(Run.open(open_store(url)), target)
    for name, table in target.tables.items():
        if not torch.equal(table.values, saved[f"{name}.weight"]):
            raise RuntimeError(f"table {name} differs when restored without a model")


def _s3() -> Any:
    import s3fs

    return s3fs.S3FileSystem(client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]})

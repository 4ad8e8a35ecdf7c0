"""Compares restores of a full and of chains of eight increments from S3 with `torch.load` and DCP.

One model, Adagrad state included, is stored with the same contents in all four forms. Each reader
starts from the store and ends with the values in the tensors of a model and its optimizers. DCP and
`torch.load` verify nothing; recpoint checks the digest of every byte it reads.

A chain is compared with a full of the same state. In `chain8_vs_full`, each of the eight increments
has 26 % of the rows, drawn evenly, all exact; the names of the others say what differs. The ratio
of bytes stands beside each ratio of times. A reader that checks its input cannot be much faster
than the bytes allow: overwritten rows lie among rows that are needed, and no digest covers less
than a chunk, so overwritten rows are read, though not decoded. At 26 % that is three times the
bytes of a full; at 1 %, little more than a full.

`quarter_*` is the restore of one of four ranks from a full that one process wrote: the rank reads a
quarter of every table, and the chunks at its ends whole.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.report import Report, alternate, ratio
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.catalog.restore.placement import PartsTarget, TablePart
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, TableTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.testing.seaweed import SeaweedServer
from recpoint.trainer_plugin.settings import FixedBits

__all__ = ["KEYS", "run"]

_DIM = 16
_INCREMENTS = 8


class _Case(NamedTuple):
    """A chain, compared with a full of the chain's last state."""

    key: str
    label: str
    bits: FixedBits
    share: float  # share of the rows that each interval changes


#: 26 % is the share in Check-N-Run's fleet, with intervals of half an hour.
_CASES = (
    _Case("chain8", "exact, 26 % dirty", "lossless", 0.26),
    _Case("chain8_4bit", "4 bits, 26 % dirty", 4, 0.26),
    _Case("chain8_2pct", "exact, 2 % dirty", "lossless", 0.02),
    _Case("chain8_1pct", "exact, 1 % dirty", "lossless", 0.01),
)
KEYS = (
    *(f"{case.key}{suffix}" for case in _CASES for suffix in ("_vs_full", "_bytes_vs_full")),
    "vs_torch_load",
    "vs_dcp",
    "quarter_bytes_vs_full",
    "quarter_vs_full",
)


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
        """Return the model's tables as targets."""
        return [*self.targets]

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Check that the dense layers were restored."""
        self.state = state


def run(*, smoke: bool) -> Report:
    """Measure all readers, after the gate."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    rows, rounds = (8_000, 1) if smoke else (2_000_000, 5)
    model = Tables(count=2, rows=rows, dim=_DIM)
    optimizers = model.optimizers(state=True)
    report = Report(name="restore", columns=("from", "MB read", "s", "MB/s of state"))
    with (
        scratch(in_memory=False) as disk,
        scratch() as memory,
        SeaweedServer(disk / "weed") as server,
    ):
        os.environ.update(server.environment())
        for case in _CASES:
            chain, full = server.run_url(), server.run_url()
            _write_chain(model, optimizers, case, chain, memory / "chain")
            with staged_run(
                model, optimizers, url=full, staging=memory / "full", bits=case.bits
            ) as tracked:
                tracked.cut_and_persist()
            peers = f"s3://{server.bucket}/peers" if case is _CASES[0] else None
            _compare(report, model, optimizers, case, full, chain, peers, rounds)
            if case is _CASES[0]:
                _compare_quarters(report, _contents(model, optimizers), full, rounds)
            shutil.rmtree(memory / "chain")
            shutil.rmtree(memory / "full")
    report.notes.append("vs_*: seconds of recpoint's full over the peer's; below 1 is faster")
    report.notes.append("*_bytes_vs_full: bytes read of the chain over those of the full")
    report.notes.append("quarter_*: one of four ranks over one process; --smoke: a chunk a table")
    return report


def _write_chain(
    model: Tables, optimizers: list[torch.optim.Optimizer], case: _Case, url: str, staging: Path
) -> None:
    rows = model.table(0).num_embeddings
    generator = torch.Generator().manual_seed(3)
    with staged_run(model, optimizers, url=url, staging=staging, bits=case.bits) as tracked:
        tracked.cut_and_persist()
        for _ in range(_INCREMENTS):
            ids = torch.randperm(rows, generator=generator)[: int(rows * case.share)]
            for index in range(len(model.tables)):
                model.top(model.table(index)(ids)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tracked.checkpointer.step()
            tracked.cut_and_persist()


def _compare(
    report: Report,
    model: Tables,
    optimizers: list[torch.optim.Optimizer],
    case: _Case,
    full: str,
    chain: str,
    peers: str | None,
    rounds: int,
) -> None:
    truth = {key: value.detach() for key, value in _contents(model, optimizers).items()}
    saved = {key: value.clone() for key, value in truth.items()}
    reports: dict[str, RestoreReport] = {}

    def from_recpoint(url: str) -> Callable[[], None]:
        store = open_store(url)  # connected once, like the peers' file system

        def read() -> None:
            target = _InPlace(model, optimizers)
            reports[url] = restore(Run.open(store), target)

        return read

    readers = {
        f"a full, {case.label}": from_recpoint(full),
        f"a chain of 1 + {_INCREMENTS}, {case.label}": from_recpoint(chain),
    }
    if peers is not None:
        readers |= _peers(peers, model, optimizers, truth)
    for name, read in readers.items():  # the gate: each restores what was saved
        for value in truth.values():
            value.fill_(-1.0)
        read()
        _require(name, saved, _contents(model, optimizers), case)
    for key, value in truth.items():
        value.copy_(saved[key])  # quantized rows were restored only within their bound
    seconds = alternate(rounds, *readers.values())
    for key, value in truth.items():
        value.copy_(saved[key])
    state_mb = sum(value.nbytes for value in truth.values()) / 1e6
    read_mb = [reports[full].bytes_read / 1e6, reports[chain].bytes_read / 1e6, state_mb, state_mb]
    for name, megabytes, times in zip(readers, read_mb, seconds, strict=False):
        median = report.timed(name, times)
        report.rows.append((name, megabytes, median, state_mb / median))
    report.put(f"{case.key}_vs_full", ratio(seconds[1], seconds[0]))
    report.figures[f"{case.key}_bytes_vs_full"] = read_mb[1] / read_mb[0]
    if peers is not None:
        report.put("vs_torch_load", ratio(seconds[0], seconds[2]))
        report.put("vs_dcp", ratio(seconds[0], seconds[3]))
        _check_memory_target(full, saved)


def _compare_quarters(
    report: Report, saved: dict[str, torch.Tensor], url: str, rounds: int
) -> None:
    """Compare four ranks that each read their rows with one process that reads all rows."""
    store = open_store(url)
    names = [key.removesuffix(".weight") for key in saved if key.endswith(".weight")]

    def read(first: int, rows: int) -> tuple[list[TablePart], RestoreReport]:
        parts = [
            TablePart(
                table=name,
                values=torch.empty(rows, saved[f"{name}.weight"].shape[1]),
                row_states={"sum": torch.empty(rows, *saved[f"{name}.sum"].shape[1:])},
                first_row=first,
            )
            for name in names
        ]
        return parts, restore(Run.open(store), PartsTarget(parts))

    rows = len(saved[f"{names[0]}.weight"])
    quarter = rows // 4
    shares: list[int] = []
    for first in range(0, rows, quarter):  # the gate
        parts, result = read(first, quarter)
        shares.append(result.bytes_read)
        for part in parts:
            for key, tensor_name in (("weight", part.values), ("sum", part.row_states["sum"])):
                if not torch.equal(
                    tensor_name, saved[f"{part.table}.{key}"][first : first + quarter]
                ):
                    raise RuntimeError(f"rows from {first} of {part.table} differ in {key}")
    whole = read(0, rows)[1].bytes_read
    seconds = alternate(rounds, lambda: read(quarter, quarter), lambda: read(0, rows))
    name = "a full, one of four ranks"
    median = report.timed(name, seconds[0])
    state_mb = sum(value.nbytes for value in saved.values()) / 4e6
    report.rows.append((name, max(shares) / 1e6, median, state_mb / median))
    report.figures["quarter_bytes_vs_full"] = max(shares) / whole
    report.put("quarter_vs_full", ratio(seconds[0], seconds[1]))


def _peers(
    url: str,
    model: Tables,
    optimizers: list[torch.optim.Optimizer],
    truth: dict[str, torch.Tensor],
) -> dict[str, Callable[[], None]]:
    """Return the readers `torch.load` and DCP, after writing the files that they read."""
    filesystem = _s3()
    with filesystem.open(f"{url}/model.pt", "wb", block_size=16 << 20) as file:
        torch.save(truth, file)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is intended
    state_dict_saver.save(truth, storage_writer=FsspecWriter(f"{url}/dcp"), no_dist=True)

    def from_torch() -> None:
        with filesystem.open(f"{url}/model.pt", "rb", block_size=16 << 20) as file:
            _load(model, optimizers, torch.load(file, weights_only=True))

    def from_dcp() -> None:
        contents = _contents(model, optimizers)  # the live tensors: DCP loads in place
        state_dict_loader.load(contents, storage_reader=FsspecReader(f"{url}/dcp"), no_dist=True)

    return {"torch.load": from_torch, "DCP": from_dcp}


def _require(
    name: str, saved: dict[str, torch.Tensor], read: dict[str, torch.Tensor], case: _Case
) -> None:
    for key, value in saved.items():
        if case.bits == "lossless" or key.endswith(".sum"):
            good = torch.equal(value, read[key])
        else:
            step = (value.amax(1) - value.amin(1)) / (2**case.bits - 1)
            good = bool(((read[key] - value).abs().amax(1) <= 2 * step + 1e-7).all())
        if not good:
            raise RuntimeError(f"{name} did not bring back {key} as it was saved")


def _contents(model: Tables, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return tables and their row states; the dense layers are a millionth of the bytes."""
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

"""Measures the consolidation of eight increments against decoding and rewriting them as a full.

One chain is read from and written to one S3 server: 4-bit rows with exact Adagrad state, 26 % of
the rows dirty in each increment. The rewrite restores the chain to memory and persists it as a
full, quantized again; its snapshot, for which a trainer would wait, is not counted. `peak_extra_mb`
is the memory that a separate process takes beyond its memory after the imports. The gate: the
consolidated full restores to the bits of the chain, state included (`bit_identical`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from benchmarks.report import Report, ratio
from benchmarks.workload import ROOT, StagedTraining, Tables, scratch, staged_run
from recpoint.catalog.consolidate.consolidate import Consolidated, consolidate
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    newest_checkpoint,
    plan_consolidation,
)
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import attempt_prefix
from recpoint.format.state_tree import flatten
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["KEYS", "run"]

KEYS = (
    "vs_rewrite",
    "bit_identical",
    "peak_extra_mb",
    "restore_before_vs_full",
    "restore_after_vs_full",
)

_DIM = 16
_BITS: Literal[4] = 4
_INCREMENTS = 8
_DIRTY_SHARE = 0.26
_THREADS = 2  # chunks read at once: as many as a consolidation reads

_CHILD = """
import sys
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import newest_checkpoint, plan_consolidation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
run = Run.open(open_store(sys.argv[1]))
plan = plan_consolidation(run, newest_checkpoint(run))
def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024
list(run.store.list())  # the client of the store is there
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = resident("VmRSS")
consolidate(run, plan)
print(resident("VmHWM") - before)
"""


def run(*, smoke: bool) -> Report:
    """Measure both ways, after the gate."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    rows, rounds = (5_000, 1) if smoke else (2_000_000, 5)
    model = Tables(count=2, rows=rows, dim=_DIM)
    optimizers = model.optimizers(state=True)
    report = Report(name="consolidate", columns=("what", "MB read", "MB written", "s"))
    with (
        scratch(in_memory=False) as disk,
        scratch() as memory,
        SeaweedServer(disk / "weed") as server,
    ):
        os.environ.update(server.environment())
        url = server.run_url()
        with staged_run(model, optimizers, url=url, staging=memory / "a", bits=_BITS) as tracked:
            tracked.cut_and_persist()
            for increment in range(_INCREMENTS):
                _train(model, optimizers, tracked, seed=increment)
                tracked.cut_and_persist()
        full = server.run_url()
        with staged_run(model, optimizers, url=full, staging=memory / "b", bits=_BITS) as tracked:
            tracked.cut_and_persist()
        _measure(report, model, optimizers, server, url, full, memory, rounds)
    return report


def _train(
    model: Tables, optimizers: list[torch.optim.Optimizer], tracked: StagedTraining, *, seed: int
) -> None:
    rows = model.table(0).num_embeddings
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(rows, generator=generator)[: int(rows * _DIRTY_SHARE)]
    for index in range(len(model.tables)):
        model.top(model.table(index)(ids)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    tracked.checkpointer.step()


def _measure(
    report: Report,
    model: Tables,
    optimizers: list[torch.optim.Optimizer],
    server: SeaweedServer,
    url: str,
    full: str,
    memory: Path,
    rounds: int,
) -> None:
    run = Run.open(open_store(url))
    name = newest_checkpoint(run)
    assert name is not None
    plan = plan_consolidation(run, name)
    chain = _restored(url)
    seconds_before = [_seconds(lambda: _restored(url)) for _ in range(rounds)]
    merges, restores, persists = [], [], []
    consolidated: Consolidated | None = None
    for number in range(rounds):
        _forget(run, plan)
        started = perf_counter()
        consolidated = consolidate(run, plan)
        merges.append(perf_counter() - started)
        _forget(run, plan)
        restores.append(_seconds(lambda: _restored(url)))
        staging = memory / f"rewrite-{number}"
        rewritten = staged_run(model, optimizers, url=server.run_url(), staging=staging, bits=_BITS)
        with rewritten as tracked:
            tracked.cut()
            persists.append(_seconds(tracked.persist))
    assert consolidated is not None
    rewrites = [a + b for a, b in zip(restores, persists, strict=True)]
    peak_bytes = _peak_bytes(url)
    seconds_after = [_seconds(lambda: _restored(url)) for _ in range(rounds)]
    fulls = [_seconds(lambda: _restored(full)) for _ in range(rounds)]
    merged = _restored(url)
    if merged.manifest is None or merged.manifest.kind != "full":
        raise RuntimeError("what was restored is not the consolidated full")
    if not _same_bits(chain, merged):
        raise RuntimeError("the consolidated full does not restore to the bits of the chain")
    report.put("vs_rewrite", ratio(merges, rewrites))
    report.figures["bit_identical"] = 1.0
    report.figures["peak_extra_mb"] = peak_bytes / 1e6
    report.put("restore_before_vs_full", ratio(seconds_before, fulls))
    report.put("restore_after_vs_full", ratio(seconds_after, fulls))
    read, written = plan.read_bytes / 1e6, consolidated.written_bytes / 1e6
    for label, megabytes, out, seconds in (
        ("consolidation", read, written, merges),
        ("rewrite: restore", plan.restore_bytes_before / 1e6, 0.0, restores),
        ("rewrite: persist", 0.0, written, persists),
        (
            f"restore of 1 + {_INCREMENTS}, before",
            plan.restore_bytes_before / 1e6,
            0.0,
            seconds_before,
        ),
        ("restore of it, after", written, 0.0, seconds_after),
        ("restore of a full of the same state", written, 0.0, fulls),
    ):
        report.rows.append((label, megabytes, out, report.timed(label, seconds)))
    report.notes.append("vs_rewrite: seconds of the consolidation over restore and persist")


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _restored(url: str) -> MemoryTarget:
    target = MemoryTarget()
    restore(Run.open(open_store(url)), target, threads=_THREADS)
    return target


def _forget(run: Run, plan: ConsolidationPlan) -> None:
    """Remove what a consolidation wrote, so that the next one does all the work again."""
    run.store.delete(plan.target.key)
    for info in list(run.store.list(attempt_prefix(*plan.target.name, plan.attempt))):
        run.store.delete(info.key)


def _peak_bytes(url: str) -> int:
    process = subprocess.run(
        [sys.executable, "-c", _CHILD, url], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return int(process.stdout.split()[-1])


def _same_bits(result: MemoryTarget, right: MemoryTarget) -> bool:
    if result.tables.keys() != right.tables.keys() or result.state.keys() != right.state.keys():
        return False
    if not all(_same_state(result.state[rank], right.state[rank]) for rank in result.state):
        return False
    for name, table in result.tables.items():
        right_table = right.tables[name]
        pairs = zip(
            (table.values, *table.row_states),
            (right_table.values, *right_table.row_states),
            strict=True,
        )
        for a, b in pairs:
            assert a is not None and b is not None
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return False
    return True


def _same_state(value: object, right: object) -> bool:
    (tree, tensors), (right_tree, right_tensors) = flatten(value), flatten(right)
    return tree == right_tree and all(map(torch.equal, tensors, right_tensors))

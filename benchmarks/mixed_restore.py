"""Compares restores of chains whose rows have widths of their own with chains of 4 bits.

A full and eight increments, each with 26 % of the rows, are stored in a local directory: with a
price of a bit at which rows have 4 bits or a little more in the mean, and with 4 bits for all; both
without residuals, and both with them. Rows have 64 values and row-wise Adagrad.

Each figure is a time for each byte read, over that of a chain of 4 bits, in the process's own time,
because other processes share the machine: `mixed_vs_4bit` without residuals, and
`mixed_vs_4bit_residuals` with residuals in both. `residuals_vs_codes` is a mixed chain with
residuals over one of 4 bits without: its restore reads the full's rows twice. First, a full
validation of each chain's newest checkpoint must pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

import torch

from benchmarks.priced_job import give_price
from benchmarks.report import Report, alternate, spread_of
from benchmarks.row_wise import RowWiseAdagrad
from benchmarks.workload import Tables, scratch, staged_run
from recpoint import Precision
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist.row_widths import importance
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName
from recpoint.kernels.allocation import EXACT, allocate
from recpoint.trainer_plugin.settings import FixedBits

__all__ = ["KEYS", "run"]

KEYS = ("mixed_vs_4bit", "mixed_vs_4bit_residuals", "residuals_vs_codes")

_DIM = 64
_BITS: Final = 4
_INCREMENTS = 8
_SHARE = 0.26
#: Of the importances, which spread as those of a trained model do.
_SCALE = 2.0**-6
_SPREAD = 3.0
_SAMPLE_ROWS = 4_000


class _Chain(NamedTuple):
    is_mixed: bool
    has_residuals: bool

    @property
    def label(self) -> str:
        """What it is, for people."""
        widths = "mixed widths" if self.is_mixed else f"{_BITS} bits"
        return f"{widths}, {'residuals' if self.has_residuals else 'codes'}"


def run(*, smoke: bool) -> Report:
    """Store four chains of two tables, and restore each into memory, in turn."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    rows, rounds = (2_000, 3) if smoke else (200_000, 11)
    report = Report(name="mixed_restore", columns=("chain", "MB read", "MB/s read"))
    chains = list(itertools.starmap(_Chain, itertools.product((False, True), (False, True))))
    reports: dict[_Chain, RestoreReport] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scratch() as memory:
            readers: list[Callable[[], None]] = []
            for chain in chains:
                url = str(memory / chain.label)
                newest = _write(chain, url, memory / f"staging {chain.label}", rows)
                opened = Run.open(open_store(url))
                verdict = validate(opened, newest, level="full")
                if verdict.result != "passed":
                    raise RuntimeError(f"{chain.label}: {verdict.findings}")
                readers.append(partial(_read, opened, chain, reports))
            for read in readers:
                read()
            seconds = dict(
                zip(chains, alternate(rounds, *readers, clock=process_time), strict=True)
            )
    finally:
        torch.set_num_threads(threads)
    for chain, times in seconds.items():
        median, megabytes = report.timed(chain.label, times), reports[chain].bytes_read / 1e6
        report.rows.append((chain.label, megabytes, megabytes / median))
    plain, residuals = _Chain(False, False), _Chain(False, True)
    for key, over, under in (
        ("mixed_vs_4bit", _Chain(True, False), plain),
        ("mixed_vs_4bit_residuals", _Chain(True, True), residuals),
        ("residuals_vs_codes", _Chain(True, True), plain),
    ):
        bytes_ratio = reports[over].bytes_read / reports[under].bytes_read
        ratios = [a / b / bytes_ratio for a, b in zip(seconds[over], seconds[under], strict=True)]
        report.put(key, spread_of(ratios))
    return report


def _write(chain: _Chain, url: str, staging: Path, rows: int) -> ManifestName:
    """Store a full and its increments; return the newest."""
    torch.manual_seed(0)
    model = Tables(count=2, rows=rows, dim=_DIM)
    of_tables = RowWiseAdagrad(model.tables.parameters(), lr=0.1)
    optimizers: list[torch.optim.Optimizer] = [
        of_tables,
        torch.optim.Adagrad(model.top.parameters(), lr=0.02),
    ]
    for table in model.tables.parameters():
        of_tables.state[table]["sum"].copy_(torch.exp(_SPREAD * torch.randn(rows)))
    weight = model.table(0).weight
    price = _price_of(weight.detach(), of_tables.state[weight]["sum"])
    width: FixedBits = 8 if chain.is_mixed else _BITS
    bits = Precision(bits=width, residual=chain.has_residuals)
    generator = torch.Generator().manual_seed(3)
    with staged_run(
        model,
        optimizers,
        url=url,
        staging=staging,
        bits=bits,
        row_local_optimizers=(RowWiseAdagrad,),
    ) as tracked:
        for number in range(1 + _INCREMENTS):
            if number:
                ids = torch.randperm(rows, generator=generator)[: int(rows * _SHARE)]
                for index in range(len(model.tables)):
                    model.top(model.table(index)(ids)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                tracked.checkpointer.step()
            job_file = tracked.cut()
            if chain.is_mixed:
                give_price(job_file, price, scale=_SCALE)
            tracked.persist()
    return max(Run.open(open_store(url)).manifest_names())


def _price_of(rows: torch.Tensor, sums: torch.Tensor) -> float:
    """Return the power of two at which rows have `_BITS` bits in the mean, or a little more."""
    sample, weights = rows[:_SAMPLE_ROWS].contiguous(), importance(sums[:_SAMPLE_ROWS], _SCALE)
    price = 1.0
    while True:
        widths = allocate(sample, weights, price).to(torch.float64)
        widths[widths == EXACT] = 32.0
        if float(widths.mean()) >= _BITS:
            return price
        price /= 2


def _read(opened: Run, chain: _Chain, reports: dict[_Chain, RestoreReport]) -> None:
    reports[chain] = restore(opened, MemoryTarget())

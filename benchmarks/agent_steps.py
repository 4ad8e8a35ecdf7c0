"""Measures an agent's steps for rows that have a price: from staged rows to recipes of chunks.

Figures are bytes of F32 rows in a second of processor time, of one thread. `quantize` reads rows
and row states, finds residuals in increments, chooses widths, and writes codes to the spool;
`encode` codes row states and ids, and digests chunks. Uploads, and what the agent reads of the full
once for each increment, are not in it: the first round is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

import torch

from benchmarks.priced_job import give_price
from benchmarks.report import Report, Spread, spread_of
from benchmarks.workload import StagedTraining, Tables, scratch, staged_run
from recpoint import Precision
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.persist.spool import empty_spool
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

__all__ = ["KEYS", "measure"]

_KINDS: Final = ("full", "residuals")
KEYS: Final = tuple(
    f"gb_per_s_agent_{step}_{kind}" for kind in _KINDS for step in ("quantize", "both")
)

_DIMS: Final = (16, 64)
#: With importances that spread as those of a trained model do, rows have 3 to 4 bits a value in
#: fulls, and their residuals 2.6 to 2.9.
_PRICE: Final = 1e-4
_SPREAD: Final = 3.0
_CHANGE: Final = 0.02


class _Seconds(NamedTuple):
    """Seconds of processor time of the rounds."""

    quantize: list[float]
    encode: list[float]


def measure(report: Report, *, row_bytes: int, rounds: int) -> None:
    """Add the speeds of fulls and of increments of residuals; each is that of the slower length.

    Args:
        report: takes the figures.
        row_bytes: bytes of the rows of a checkpoint.
        rounds: of each.

    Raises:
        RuntimeError: a checkpoint of these steps does not pass its validation.
    """
    speeds: dict[str, list[Spread]] = {key: [] for key in KEYS}
    for dim in _DIMS:
        for kind, seconds in zip(_KINDS, _of_dim(dim, row_bytes, rounds), strict=True):
            both = [sum(pair) for pair in zip(*seconds, strict=True)]
            for step, times in (("quantize", seconds.quantize), ("both", both)):
                key = f"gb_per_s_agent_{step}_{kind}"
                report.timed(f"{key}, dim {dim}", times)
                speeds[key].append(spread_of([row_bytes / each / 1e9 for each in times]))
    for key, of_dims in speeds.items():
        report.put(key, min(of_dims))


def _of_dim(dim: int, row_bytes: int, rounds: int) -> Sequence[_Seconds]:
    """Return the seconds for a full, and for an increment with residuals of all of its rows."""
    torch.manual_seed(dim)
    model = Tables(count=1, rows=row_bytes // (4 * dim), dim=dim)
    weight = model.table(0).weight
    optimizers = model.optimizers(state=True)
    seconds: list[_Seconds] = []
    with scratch() as memory, torch.no_grad():
        weight.copy_(0.05 * torch.randn_like(weight))
        sums = torch.exp(_SPREAD * torch.randn(len(weight), 1))
        optimizers[0].state[weight]["sum"].copy_(sums * (0.5 + torch.rand_like(weight)))
        with staged_run(
            model,
            optimizers,
            url=f"{memory / 'run'}",
            staging=memory / "staging",
            bits=Precision(bits=8, residual=True, state=8),
        ) as tracked:
            for _ in _KINDS:
                tracked.checkpointer.mark_all("tables.0")
                tracked.checkpointer.step()
                job_file = tracked.cut()
                give_price(job_file, _PRICE, scale=1.0)
                seconds.append(_timed(job_file, rounds))
                _store(tracked)
                weight.add_(_CHANGE * torch.randn_like(weight))
    return seconds


def _timed(job_file: Path, rounds: int) -> _Seconds:
    """Run both steps in each round, on an empty spool, and one round before that."""
    job = PersistJob.open(job_file)
    quantize, encode = [], []
    for _ in range(1 + rounds):
        empty_spool(job.staged)
        start = process_time()
        for group in job.groups:
            if group.quantized:
                job.quantize(group)
        middle = process_time()
        for group in job.groups:
            job.encode(group)
        quantize.append(middle - start)
        encode.append(process_time() - middle)
    return _Seconds(quantize[1:], encode[1:])


def _store(tracked: StagedTraining) -> None:
    """Commit the checkpoint, and check that its rows are within the bounds of their codes."""
    tracked.persist()
    run = Run.open(open_store(tracked.url))
    newest = run.manifest_names()[-1]
    validated = validate(run, newest, level="full")
    if validated.result != "passed":
        raise RuntimeError(f"{newest}: {validated.findings}")

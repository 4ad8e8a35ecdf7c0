"""A rank is told to end while gradients wait for a step: all ranks end after one batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.forked_program import ForkedProgram, be_code
from tests.training_builder import Place

RANKS, ACCUMULATED = 2, 3

PROGRAM = """
import hashlib, os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.training_builder import Batches, Place, checkpointer, everything, simple_training

folder, run, staging, rank, total, accumulated, terminated_after = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=int(rank), world_size=2)
training = simple_training()
training.reader = Batches(int(rank))
(optimizer,) = training.optimizers
place = Place(run, Path(staging))
with checkpointer(training, place, interval_batches=10**6, handle_sigterm=True) as ckpt:
    ckpt.restore()
    for users, items, target in ckpt.batches(total=int(total)):
        batch = ckpt.batches_done + 1
        nn.functional.mse_loss(training.model(users, items), target).backward()
        if batch % int(accumulated) == 0:
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if batch == int(terminated_after):
            os.kill(os.getpid(), signal.SIGTERM)
state = repr(everything(training)).encode()
Path(folder, f"end-{rank}").write_text(hashlib.sha256(state).hexdigest())
"""


def _train(place: Place, folder: Path, *, total: int, terminated_after: int = 0) -> list[int]:
    """Train on all ranks; the last one sends itself SIGTERM after a batch, unless that is 0."""
    folder.mkdir()
    running = [
        ForkedProgram(
            be_code,
            [
                *(PROGRAM, str(folder), place.run, str(place.staging), str(rank), str(total)),
                *(str(ACCUMULATED), str(terminated_after if rank == RANKS - 1 else 0)),
            ],
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            output=(folder / f"log-{rank}", folder / f"log-{rank}"),
        )
        for rank in range(RANKS)
    ]
    try:
        return [one.wait() for one in running]
    finally:
        for one in running:
            one.kill()


def _ends(folder: Path) -> list[str]:
    return [(folder / f"end-{rank}").read_text() for rank in range(RANKS)]


def _logs(folder: Path) -> str:
    return "\n".join((folder / f"log-{rank}").read_text() for rank in range(RANKS))


def test_all_ranks_end_after_one_batch_that_has_a_step(place: Place, tmp_path: Path) -> None:
    ended, resumed, whole = (tmp_path / name for name in ("ended", "resumed", "whole"))
    with place.agent():
        codes = _train(place, ended, total=10**9, terminated_after=ACCUMULATED + 1)
        assert codes == [-signal.SIGTERM] * RANKS, _logs(ended)
        run = Run.open(open_store(place.run))
        (name,) = run.live_line()
        assert name.step % ACCUMULATED == 0 and name.step >= 2 * ACCUMULATED
        end = read_end(run, 1)
        assert end is not None and (end.step, end.reason) == (name.step, "terminated")
        total = name.step + 2 * ACCUMULATED
        assert _train(place, resumed, total=total) == [0] * RANKS, _logs(resumed)
        other = Place(str(tmp_path / "other"), place.staging)
        assert _train(other, whole, total=total) == [0] * RANKS, _logs(whole)
    assert _ends(resumed) == _ends(whole)

"""A store's client draws random numbers; the training process's generators must not show it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recpoint import Timeouts
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.trainer_plugin.checkpointer import Checkpointer


def generators() -> tuple[object, bytes, bytes]:
    numpy_words = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    return random.getstate(), numpy_words, bytes(torch.get_rng_state().numpy())


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_generators_are_those_of_training_alone(s3_run_url: str, tmp_path: Path) -> None:
    def start() -> Checkpointer:
        model = nn.Sequential(nn.Embedding(20, 2, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed(number)
        return Checkpointer(
            model,
            optimizer,
            run=s3_run_url,
            interval_batches=100,
            staging=tmp_path,
            timeouts=Timeouts(close_seconds=0, drain_seconds=0),
        )

    number = 1
    with start() as checkpointer:
        before = generators()
        assert checkpointer.restore() is None
        assert generators() == before
        checkpointer.step()
        checkpointer.checkpoint()
    assert generators() == before
    seed(number)
    assert generators() == before, "building it has drawn something"

    (run_dir,) = [run.path for run in staged_runs(tmp_path)]
    for job in StagedRun(run_dir).staged_jobs():
        persist_job(job)
    number = 2
    with start() as checkpointer:
        assert checkpointer.restore() is not None
        # Those of the checkpoint, although the run was claimed over the network after it was read.
        assert generators() == before

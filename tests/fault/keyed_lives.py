"""Lives of a training with keyed tables: each goes on where the one before was killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from recpoint import (
    Checkpointer,
    KeyedEmbedding,
    KeyedEmbeddingBag,
    LeastRecent,
    LeastUsed,
    Options,
    Probability,
    Seen,
    Staging,
    Timeouts,
)
from recpoint.embeddings import Uniform
from tests.keyed_training import KeyedReader
from tests.polling import until
from tests.training_builder import InlineAgent, seed_everything

__all__ = ["INTERVAL", "LAST_BATCH", "RULES", "Moment", "keyed_life"]

Moment = Literal["lookup", "backward", "step", "any"]

INTERVAL, LAST_BATCH = 3, 13

RULES: Final[dict[str, dict[str, Any]]] = {
    "recent": {"evict": LeastRecent()},
    "ttl": {"evict": LeastRecent(ttl_batches=2)},
    "used": {"evict": LeastUsed()},
    "seen": {"evict": LeastUsed(), "admit": Seen(times=2)},
    "probability": {"evict": LeastRecent(), "admit": Probability(share=0.6)},
}


def _kill_at_any_moment(seed: int) -> None:
    """Kill this process within the time of its training, from another thread."""
    time.sleep(random.Random(seed).random() * 0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def keyed_life(*, place: str, kill_in: int | None = None, moment: Moment = "lookup") -> None:
    """Train tables of all rules to the end, and save all state; or die.

    Args:
        place: directory of the run.
        kill_in: number of the batch in which this process is killed; at `any` moment the seed of
            the moment; None: it is not.
        moment: where in that batch.
    """
    torch.set_num_threads(1)
    seed_everything(1)
    folder = Path(place)
    initial = Uniform(seed=2)
    model = torch.nn.ModuleDict()
    for rule, settings in RULES.items():
        model[f"{rule} users"] = KeyedEmbedding(4, 14, sparse=True, initial=initial, **settings)
        model[f"{rule} bags"] = KeyedEmbeddingBag(4, 9, mode="sum", initial=initial, **settings)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    with (
        InlineAgent(folder / "staging"),
        Checkpointer(
            model,
            optimizer,
            run=f"{place}/run",
            reader=KeyedReader(),
            interval_batches=INTERVAL,
            staging=Staging(directory=folder / "staging"),
            timeouts=Timeouts(close_seconds=120.0, drain_seconds=120.0),
            options=Options(announce=False),
        ) as checkpoints,
    ):
        checkpoints.restore()
        first = checkpoints.batches_done
        if moment == "any" and kill_in is not None:
            threading.Thread(target=_kill_at_any_moment, args=(kill_in,), daemon=True).start()
        for keys, target in checkpoints.batches(total=LAST_BATCH):
            number = checkpoints.batches_done + 1
            due = (number - 1) // INTERVAL - first // INTERVAL
            until(partial(_has_committed, checkpoints, due))
            optimizer.zero_grad()
            loss = torch.zeros(())
            for rule in RULES:
                loss = loss + (model[f"{rule} users"](keys) * target[:, None]).sum()
                loss = loss + model[f"{rule} bags"]((keys % 11).view(2, -1)).sum()
            _kill(moment, "lookup", number, kill_in)
            loss.square().backward()
            _kill(moment, "backward", number, kill_in)
            optimizer.step()
            _kill(moment, "step", number, kill_in)
        if moment == "any" and kill_in is not None:
            time.sleep(1.0)  # the other thread kills it meanwhile
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
        }
        torch.save(saved, folder / "state.pt")


def _kill(moment: Moment, here: Moment, number: int, kill_in: int | None) -> None:
    if (moment, kill_in) == (here, number):
        os.kill(os.getpid(), signal.SIGKILL)


def _has_committed(checkpoints: Checkpointer, count: int) -> bool:
    return checkpoints.stats.committed == count

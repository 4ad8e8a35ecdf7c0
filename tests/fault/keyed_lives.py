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
from torch import Tensor

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
from recpoint.embeddings import Uniform, cached, local
from recpoint.embeddings.cache.lookup_hooks import cache_of
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
    """Kill this process while it restores or trains, from another thread."""
    time.sleep(random.Random(seed).random() * 0.7)
    os.kill(os.getpid(), signal.SIGKILL)


def keyed_life(
    *,
    place: str,
    kill_in: int | None = None,
    moment: Moment = "lookup",
    is_cached: bool = False,
    last_batch: int = LAST_BATCH,
    capacity_factor: int = 1,
) -> None:
    """Train tables of all rules to the end, and save all state; or die.

    Args:
        place: directory of the run.
        kill_in: number of the batch in which this process is killed; at `any` moment the seed of
            the moment; None: it is not.
        moment: where in that batch.
        is_cached: rows are in a cache, which has fewer slots than tables, and in files.
        last_batch: number of the last batch.
        capacity_factor: tables have so many times the rows.
    """
    if moment == "any" and kill_in is not None:
        threading.Thread(target=_kill_at_any_moment, args=(kill_in,), daemon=True).start()
    torch.set_num_threads(1)
    seed_everything(1)
    folder = Path(place)
    initial = Uniform(seed=2)
    model = torch.nn.ModuleDict()
    for rule, settings in RULES.items():
        model[f"{rule} users"] = KeyedEmbedding(
            4, 14 * capacity_factor, sparse=True, initial=initial, **settings
        )
        model[f"{rule} bags"] = KeyedEmbeddingBag(
            4, 9 * capacity_factor, mode="sum", initial=initial, **settings
        )
    if is_cached:
        cached(model, local(folder / "home"), dict.fromkeys(model, 7))
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
        for keys, target in checkpoints.batches(total=last_batch):
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
        torch.save(_state_of(model, optimizer), folder / "state.pt")


def _state_of(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all state of keyed tables, whose rows may be in a cache and at home."""
    cache, saved = cache_of(model), {}
    for name, table in model.items():
        assert isinstance(table, KeyedEmbedding | KeyedEmbeddingBag)
        if cache is None:
            rows: tuple[Tensor, ...] = table.weight.detach(), optimizer.state[table.weight]["sum"]
        else:
            rows = cache.rows_of(name, torch.arange(table.capacity_rows + 1))
        saved[name] = {
            "rows": list(rows),
            "row_states": dict(table.slots.row_states),
            "state": table.slots.state_dict(),
        }
    return saved


def _kill(moment: Moment, here: Moment, number: int, kill_in: int | None) -> None:
    if (moment, kill_in) == (here, number):
        os.kill(os.getpid(), signal.SIGKILL)


def _has_committed(checkpoints: Checkpointer, count: int) -> bool:
    return checkpoints.stats.committed == count

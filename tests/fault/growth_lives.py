"""Lives of a training whose table grows: each goes on where the one before was killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import recpoint
from recpoint import Checkpointer, Lookahead, Options, Staging, Timeouts
from recpoint.embeddings import Uniform, cached, local, read_rows
from tests.polling import until
from tests.training_builder import InlineAgent, seed_everything

__all__ = ["INTERVAL", "LAST_BATCH", "Kind", "growing_life"]

Kind = Literal["plain", "memory", "files"]

INTERVAL, LAST_BATCH = 3, 10
_ROWS, _MORE_ROWS, _DIM, _BATCH_BEFORE_GROWTH = 60, 90, 4, 4


class _Numbered:
    """A reader whose batch follows from its number; later batches look up more rows."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> _Numbered:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        rows = _ROWS if self.position < _BATCH_BEFORE_GROWTH else _MORE_ROWS
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        return {"users": torch.randint(0, rows, (8,), generator=generator)}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _has_committed(checkpoints: Checkpointer, count: int) -> bool:
    return checkpoints.stats.committed == count


def growing_life(*, place: str, kind: Kind, kill_in: int | None = None) -> None:
    """Train to the end, and save all rows; or die in a batch, between forward and backward pass.

    As a script does, it keeps the number of users in a file, and builds the table for them.
    """
    torch.set_num_threads(1)
    seed_everything(1)
    vocabulary, folder = Path(place) / "users", Path(place)
    rows = int(vocabulary.read_text()) if vocabulary.exists() else _ROWS
    users = torch.nn.Embedding(rows, _DIM, sparse=True)
    torch.nn.init.constant_(users.weight, 0.25)
    model = torch.nn.ModuleDict({"users": users})
    reader: Any = _Numbered()
    if kind != "plain":
        cached(model, local(None if kind == "memory" else folder / f"home-{os.getpid()}"), 30)
        reader = Lookahead(reader, model, window=3)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    with (
        InlineAgent(folder / "staging"),
        Checkpointer(
            model,
            optimizer,
            run=f"{place}/run",
            reader=reader,
            interval_batches=INTERVAL,
            staging=Staging(directory=folder / "staging"),
            timeouts=Timeouts(close_seconds=120.0, drain_seconds=120.0),
            options=Options(grow={"users": Uniform(seed=2)}, announce=False),
        ) as checkpoints,
    ):
        checkpoints.restore()
        first = checkpoints.batches_done
        for batch in checkpoints.batches(total=LAST_BATCH):
            number = checkpoints.batches_done + 1
            due = (number - 1) // INTERVAL - first // INTERVAL
            until(partial(_has_committed, checkpoints, due))
            if number > _BATCH_BEFORE_GROWTH:
                vocabulary.write_text(str(_MORE_ROWS))
                recpoint.grow(model, optimizer, "users", _MORE_ROWS)
            optimizer.zero_grad()
            looked_up = users(batch["users"])
            if number == kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            looked_up.square().sum().backward()
            optimizer.step()
        torch.save(read_rows(model, "users", optimizer), folder / "rows.pt")

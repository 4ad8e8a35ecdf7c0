"""Trains a model whose rows are on embedding servers, with checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead
from recpoint.embeddings.home.contract import Home
from tests.cached_training import (
    Batches,
    Model,
    Rows,
    as_bits,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.flat_settings import arguments
from tests.training_builder import Place

__all__ = ["INTERVAL", "SLOTS", "Trained"]

SLOTS = {"users": 10, "items": 26}
INTERVAL = 5


class Trained:
    """A model with its optimizer and reader; in a cache if there is a home."""

    def __init__(
        self, home: Home | None = None, *, slots: dict[str, int] | None = None, window: int = 3
    ) -> None:
        self.reader: Any = Batches()
        if home is None:
            self.model: Model = plain_model(sparse=True)
        else:
            self.model, self.cache = cached_model(slots or SLOTS, home, sparse=True)
            self.reader = Lookahead(self.reader, self.model, window=window)
        self._home = home
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1, initial_accumulator_value=0.2)

    @contextmanager
    def checkpointing(
        self, place: Place, *, has_agent: bool = True, **settings: Any
    ) -> Iterator[Checkpointer]:
        """Restore the newest checkpoint, and take one after every few batches and at the end.

        Without an agent of its own, the caller runs one.
        """
        with place.agent() if has_agent else nullcontext():
            checkpoints = Checkpointer(
                self.model,
                self.optimizer,
                **arguments(
                    {
                        "run": place.run,
                        "directory": place.staging,
                        "reader": self.reader,
                        "interval_batches": INTERVAL,
                        "small_table_values": 0,
                        "close_seconds": 120.0,
                        "drain_seconds": 120.0,
                        "handle_sigterm": False,
                        "announce": False,
                        **settings,
                    }
                ),
            )
            try:
                checkpoints.restore()
                yield checkpoints
            except BaseException:
                checkpoints.close(final=False)
                raise
            checkpoints.close()

    def train(
        self,
        batches: int,
        checkpoints: Checkpointer | None = None,
        after: Callable[[int], None] = lambda _: None,
    ) -> None:
        def after_batch(number: int) -> None:
            if checkpoints is not None:
                checkpoints.step()
            after(number)

        train(self.model, self.optimizer, self.reader, batches=batches, after=after_batch)

    @property
    def rows(self) -> Rows:
        if self._home is None:
            return rows_of_plain(self.model, self.optimizer)
        return rows_of_cache(self.cache)

    def is_same_as(self, other: Trained) -> bool:
        """Whether all rows, row states and dense weights are, bit for bit."""
        return self.rows.differences(other.rows) == [] and torch.equal(
            as_bits(self.model.top.weight), as_bits(other.model.top.weight)
        )

    def close(self) -> None:
        self.cache.close()

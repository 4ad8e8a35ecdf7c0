"""Holds batches that were read ahead of training, with the ids that each looks up."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.state.batch_ids import Features, Ids, bytes_of, check_names, ids_of

__all__ = ["HeldBatches"]


@dataclass
class _HeldBatch:
    """A batch that was read and not handed out.

    Attributes:
        batch: the batch.
        ids: table name -> ids [number of ids]; None: the tables are not known yet.
        bytes: bytes of the batch.
    """

    batch: Any
    ids: dict[str, Tensor] | None
    bytes: int


class HeldBatches:
    """The batches that a Lookahead has read and not handed out, oldest first.

    Args:
        ids: as `Lookahead` takes it.
        tables: table name -> number of rows of the whole table; None: not known yet.

    Attributes:
        size_bytes: bytes of the batches, and of their ids, as far as they can be counted.
    """

    def __init__(self, ids: Ids | None, tables: Mapping[str, int] | None) -> None:
        self._ids = ids
        self._tables = tables
        self._features: Features = {}
        self._batches: deque[_HeldBatch] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def attach(self, tables: Mapping[str, int], features: Features) -> None:
        """Take the tables of the model, and the tables of each feature of jagged batches.

        Raises:
            SettingsError: a batch has ids of a table that does not exist, or its ids are not valid.
        """
        self._tables, self._features = dict(tables), features
        for held_batch in self._batches:
            if held_batch.ids is None:
                self._find_ids(held_batch)
            else:
                check_names(held_batch.ids, self._tables)
        self.size_bytes = sum(held_batch.bytes for held_batch in self._batches)

    def add(self, batch: Any) -> None:
        """Add a batch that was read.

        Raises:
            SettingsError: its ids are not valid. It is not added then.
        """
        held_batch = _HeldBatch(batch, None, 0)
        self._find_ids(held_batch)
        self._batches.append(held_batch)
        self.size_bytes += held_batch.bytes

    def take(self) -> Any:
        """Take the oldest batch out, and return it."""
        held_batch = self._batches.popleft()
        self.size_bytes -= held_batch.bytes
        return held_batch.batch

    def forget(self) -> None:
        """Drop all batches."""
        self._batches.clear()
        self.size_bytes = 0

    @property
    def ids(self) -> list[Mapping[str, Tensor]]:
        """The ids of each batch, as far as they are known; another thread may take batches."""
        return [held_batch.ids or {} for held_batch in list(self._batches)]

    @property
    def oldest_ids(self) -> Mapping[str, Tensor]:
        """The ids of the oldest batch, as far as they are known."""
        return self._batches[0].ids or {}

    def coming(self, n: int) -> tuple[Mapping[str, Tensor], ...]:
        """Return the ids of the `n` oldest batches; see `Lookahead.coming`."""
        if not 0 <= n <= len(self._batches):
            raise ValueError(f"{n} batches are asked for, and {len(self._batches)} are held")
        coming_ids = []
        for held_batch in islice(self._batches, n):
            if held_batch.ids is None:
                raise SettingsError(
                    "Lookahead.coming()",
                    found="no names of tables",
                    expected="names, to find the ids in batches that are mappings",
                    next_step="pass the Lookahead to a Checkpointer, or a model to the Lookahead",
                )
            coming_ids.append(held_batch.ids)
        return tuple(coming_ids)

    def _find_ids(self, held_batch: _HeldBatch) -> None:
        if self._ids is not None or self._tables is not None:
            held_batch.ids = ids_of(held_batch.batch, self._ids, self._tables, self._features)
        held_batch.bytes = bytes_of(held_batch.batch, held_batch.ids or {})

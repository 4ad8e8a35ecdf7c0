"""Trains one model with its tables in a cache or otherwise: the peers that `cache` compares.

All peers train the same batches with the same optimizer. The model is embedding tables and one
small layer. A timed wait stands for the dense layers, which would run on an accelerator.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.row_wise import RowWiseAdagrad
from recpoint import Lookahead
from recpoint.embeddings import Uniform, cached
from recpoint.embeddings.cache import Cache
from recpoint.embeddings.cached_tables import cache_of
from recpoint.embeddings.home import Home
from recpoint.embeddings.home_in_files import FileHome
from recpoint.embeddings.slots import TableSlots

__all__ = [
    "DIM",
    "INITIAL",
    "AllInMemory",
    "Batch",
    "CachedPeer",
    "MakeOptimizer",
    "Peer",
    "TablesModel",
    "Uncached",
    "fill_home",
    "row_wise",
]

DIM = 16
INITIAL = Uniform(seed=7, low=-0.05, high=0.05)

#: Makes the optimizer of the tables.
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

#: Rows that are written to a home at once.
_PIECE_ROWS = 1 << 18


class Batch(NamedTuple):
    """One batch of n samples."""

    sparse: Tensor  # I64 [tables, n], contiguous
    label: Tensor  # F32 [n]


class TablesModel(nn.Module):
    """Tables with sparse gradients, whose rows are summed, and one layer.

    Args:
        rows: name of a table -> its rows.
        device: of the tables.
    """

    def __init__(self, rows: Mapping[str, int], *, device: str = "meta") -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {n: nn.Embedding(r, DIM, sparse=True, device=device) for n, r in rows.items()}
        )
        generator = torch.Generator().manual_seed(3)
        self.top = nn.Linear(DIM, 1, device="cpu")
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, sparse: Tensor) -> Tensor:
        """Returns logits F32 [n] of I64 [tables, n]."""
        rows = [table(ids) for table, ids in zip(self.tables.values(), sparse, strict=True)]
        logits: Tensor = self.top(torch.stack(rows).sum(dim=0))
        return logits.squeeze(1)

    def weights(self) -> list[nn.Parameter]:
        """Returns the tables' parameters."""
        return list(self.tables.parameters())


def row_wise(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns Adagrad with one sum a row, with which the measured runs train."""
    return RowWiseAdagrad(weights, lr=0.1)


class _Trained:
    """A model with the optimizers of its tables and of its layer."""

    def __init__(self, model: TablesModel, make: MakeOptimizer) -> None:
        self.model = model
        self.of_tables = make(model.weights())
        self._of_top = torch.optim.SGD(model.top.parameters(), lr=0.01)

    def train(self, sparse: Tensor, label: Tensor) -> float:
        """Trains a batch; returns its loss."""
        self.of_tables.zero_grad()
        self._of_top.zero_grad()
        logits = self.model(sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        loss.backward()
        self.of_tables.step()
        self._of_top.step()
        return loss.item()


class Peer(ABC):
    """One way to keep the tables; it goes on where the last `play` ended.

    Attributes:
        own_seconds: of all batches so far, the time of lookups, gradients and steps, without the
            timed wait and without waits for rows.
    """

    def __init__(self) -> None:
        self.own_seconds = 0.0

    @abstractmethod
    def play(self, batches: int, *, wait: float) -> list[float]:
        """Trains batches, and does all I/O that they cause.

        Args:
            batches: number of batches.
            wait: least seconds from the moment when a batch's rows are there to its last step.

        Returns:
            The losses.
        """

    def moved(self) -> tuple[int, int]:
        """Returns the rows that were read from the home so far, and those written back."""
        return 0, 0

    def settle(self) -> None:
        """Waits until the home merges nothing, so that nothing is left to the next peer."""
        return

    def close(self) -> None:
        """Gives everything up."""
        return

    def _step(self, trained: _Trained, batch: Batch, sparse: Tensor, wait: float) -> float:
        """Trains a batch whose rows are there, and waits for the accelerator."""
        begun = time.perf_counter()
        loss = trained.train(sparse, batch.label)
        own = time.perf_counter() - begun
        self.own_seconds += own
        if own < wait:
            time.sleep(wait - own)
        return loss


class AllInMemory(Peer):
    """Plain tables.

    Args:
        rows: name of a table -> its rows.
        batches: the batches.
        fill: gives the tables their values.
        make: makes their optimizer.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        batches: Sequence[Batch],
        fill: Callable[[TablesModel], object],
        make: MakeOptimizer = row_wise,
    ) -> None:
        super().__init__()
        self.model = TablesModel(rows)
        for table in self.model.tables.values():
            assert isinstance(table, nn.Embedding)
            shape = (table.num_embeddings, DIM)
            weight = torch.empty(shape, dtype=torch.float32, device="cpu")
            table.weight = nn.Parameter(weight)
        fill(self.model)
        self.trained = _Trained(self.model, make)
        self._batches = iter(batches)

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        coming = (next(self._batches) for _ in range(batches))
        return [self._step(self.trained, one, one.sparse, wait) for one in coming]


class CachedPeer(Peer):
    """Tables in a cache.

    Without a window, the rows of a batch are brought when the batch comes, all at once, and the
    rows that were looked up least recently leave. This is an LRU cache.

    Args:
        rows: name of a table -> its rows.
        batches: the batches.
        home: the home. It is closed with this.
        capacity: slots of all tables, or by name.
        window: window of the Lookahead; None: no Lookahead.
        is_filled: the home has all rows already.
        make: makes the optimizer of the tables.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        batches: Sequence[Batch],
        home: Home,
        capacity: int | Mapping[str, int],
        *,
        window: int | None,
        is_filled: bool = False,
        make: MakeOptimizer = row_wise,
    ) -> None:
        super().__init__()
        self.home = home
        self.model = TablesModel(rows)
        cached(self.model, home, capacity, initial=INITIAL, row_local_optimizers=(RowWiseAdagrad,))
        self.trained = _Trained(self.model, make)
        found = cache_of(self.model)
        assert found is not None
        self.cache: Cache = found
        for table in self.cache.tables.values():
            if is_filled:
                self.cache.follow_states(table, self.trained.of_tables)
                self.cache.put_at_home(table)
        self._names = list(self.cache.tables)
        self._reader: Iterator[Batch]
        if window is None:
            self._reader = self._brought(batches)
        else:
            self._reader = iter(
                Lookahead(_Reader(batches), self.model, ids=self._ids, window=window)
            )

    def _ids(self, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(self._names, batch.sparse, strict=True))

    def _brought(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yields batches whose rows are brought when the batch is asked for."""
        for batch in batches:
            self.cache.end_batch()
            self.cache.plan(self._ids(batch), is_next=True)
            self.cache.begin_batch()
            yield batch

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        losses = [
            self._step(self.trained, batch, batch.sparse, wait)
            for batch in (next(self._reader) for _ in range(batches))
        ]
        # The home thread may be a window ahead, or behind. Rounds begin and end with it idle, so
        # that each has the I/O of as many batches as it trains.
        self.cache._thread.submit(lambda: None).result()
        return losses

    def moved(self) -> tuple[int, int]:
        """See `Peer`."""
        return self.cache.stats.fetched_bytes // self._record_bytes, self.cache.stats.written_rows

    @property
    def _record_bytes(self) -> int:
        layouts = [table.slots.layout for table in self.cache.tables.values()]
        return max(1 if layout is None else layout.size_bytes for layout in layouts)

    def settle(self) -> None:
        """See `Peer`."""
        _settle(self.home)

    def close(self) -> None:
        """See `Peer`."""
        self.cache.close()
        self.home.close()


class Uncached(Peer):
    """Reads the rows of each batch from the home, and writes them back after its step.

    Args:
        rows: name of a table -> its rows.
        batches: the batches.
        home: the home. It is closed with this.
    """

    def __init__(self, rows: Mapping[str, int], batches: Sequence[Batch], home: Home) -> None:
        super().__init__()
        self.home = home
        self.moved_rows = 0
        most = batches[0].sparse.shape[1]
        self.model = TablesModel(rows)
        self._slots: list[TableSlots] = []
        for name, table in self.model.tables.items():
            assert isinstance(table, nn.Embedding)
            one = TableSlots(
                f"tables.{name}",
                rows=rows[name],
                capacity=min(most, rows[name]),
                dim=DIM,
                dtype=torch.float32,
                device=torch.device("cpu"),
                trained=True,
            )
            table.weight = one.weight
            self._slots.append(one)
        self.trained = _Trained(self.model, row_wise)
        for one in self._slots:
            one.follow_states({"sum": self.trained.of_tables.state[one.weight]["sum"]})
            home.add_table(one.name, rows=one.rows, record_bytes=one.fix_layout().size_bytes)
        self._batches = iter(batches)
        self._number = 1

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        losses = []
        for _ in range(batches):
            batch = next(self._batches)
            places = torch.empty_like(batch.sparse)
            moved = []
            for slots, ids, at in zip(self._slots, batch.sparse, places, strict=True):
                unique, inverse = torch.unique(ids, return_inverse=True)
                at.copy_(inverse)
                moved.append(unique)
                self._fetch(slots, unique)
            losses.append(self._step(self.trained, batch, places, wait))
            self._number += 1
            for slots, unique in zip(self._slots, moved, strict=True):
                records = slots.records(_first(len(unique)))
                self.home.write_back(slots.name, unique, records, batch=self._number)
                self.moved_rows += len(unique)
        return losses

    def _fetch(self, slots: TableSlots, ids: Tensor) -> None:
        size = slots.fix_layout().size_bytes
        records = torch.empty(len(ids), size, dtype=torch.uint8, device="cpu")
        there = self.home.fetch(slots.name, ids, records)
        at = _first(len(ids))
        if bool(there.all()):
            slots.put(at, records)
            return
        slots.put(at[there], records[there])
        slots.put_new(at[~there], INITIAL(slots.name, ids[~there], DIM, torch.float32))

    def moved(self) -> tuple[int, int]:
        """See `Peer`."""
        return self.moved_rows, self.moved_rows

    def settle(self) -> None:
        """See `Peer`."""
        _settle(self.home)

    def close(self) -> None:
        """See `Peer`."""
        self.home.close()


class _Reader:
    """Batches that are drawn already."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches, self._position = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        while self._position < len(self._batches):
            self._position += 1
            yield self._batches[self._position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


def fill_home(home: Home, rows: Mapping[str, int]) -> None:
    """Writes all rows of the tables to a home, as a restore does: row-wise Adagrad's records.

    Their values are of the right size and distribution, but repeat.
    """
    generator = torch.Generator().manual_seed(5)
    piece = min(_PIECE_ROWS, max(rows.values()))
    records = torch.zeros(piece, DIM + 1, dtype=torch.float32, device="cpu")
    records[:, :DIM].uniform_(-0.05, 0.05, generator=generator)
    as_bytes = records.view(torch.uint8)
    for name, count in rows.items():
        home.add_table(f"tables.{name}", rows=count, record_bytes=as_bytes.shape[1])
        for first in range(0, count, piece):
            ids = torch.arange(first, min(first + piece, count), dtype=torch.int64, device="cpu")
            home.write_back(f"tables.{name}", ids, as_bytes[: len(ids)], batch=0)
    _settle(home)


def _settle(home: Home) -> None:
    if not isinstance(home, FileHome):
        return
    while home._merging is not None or (home._failure is None and home._next_merge() is not None):
        time.sleep(0.01)


def _first(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")

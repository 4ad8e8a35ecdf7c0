"""Trains one model with its tables in a cache or otherwise: the peers that `cache` compares.

All peers train the same batches with the same optimizer. The model is embedding tables and one
small layer. A timed wait stands for the dense layers, which would run on an accelerator.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.row_wise import RowWiseAdagrad
from recpoint import Lookahead
from recpoint.embeddings import Uniform, cached
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.files import FileHome
from recpoint.embeddings.tables.optimizers import row_states

__all__ = [
    "DIM",
    "INITIAL",
    "OPTIMIZERS",
    "AllInMemory",
    "Batch",
    "CachedPeer",
    "MakeOptimizer",
    "Peer",
    "TablesModel",
    "Uncached",
    "any_values",
    "fill_home",
    "row_wise",
    "same_bits",
    "state_in_cache",
    "state_in_memory",
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
        dim: values of a row.
        device: of the tables.
    """

    def __init__(self, rows: Mapping[str, int], *, dim: int = DIM, device: str = "meta") -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {n: nn.Embedding(r, dim, sparse=True, device=device) for n, r in rows.items()}
        )
        generator = torch.Generator().manual_seed(3)
        self.top = nn.Linear(dim, 1, device="cpu")
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, sparse: Tensor) -> Tensor:
        """Return logits F32 [n] of I64 [tables, n]."""
        rows = [table(ids) for table, ids in zip(self.tables.values(), sparse, strict=True)]
        logits: Tensor = self.top(torch.stack(rows).sum(dim=0))
        return logits.squeeze(1)

    def weights(self) -> list[nn.Parameter]:
        """Return the tables' parameters."""
        return list(self.tables.parameters())


def row_wise(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adagrad with one sum a row, with which the measured runs train."""
    return RowWiseAdagrad(weights, lr=0.1)


#: By name, the optimizers whose results are compared.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.5),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "row-wise Adagrad": row_wise,
    "SparseAdam": lambda weights: torch.optim.SparseAdam(weights, lr=0.01),
}


class _Trained:
    """A model with the optimizers of its tables and of its layer.

    Args:
        model: the model.
        make: makes the optimizer of the tables.
        reduce: makes the gradient of a parameter of the layer that of all trainers.
    """

    def __init__(
        self,
        model: TablesModel,
        make: MakeOptimizer,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self._reduce = reduce
        self.of_tables = make(model.weights())
        self.of_top = torch.optim.SGD(model.top.parameters(), lr=0.01)

    def train(self, sparse: Tensor, label: Tensor) -> float:
        """Train a batch; return its loss."""
        self.of_tables.zero_grad()
        self.of_top.zero_grad()
        logits = self.model(sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        loss.backward()
        if self._reduce is not None:
            for parameter in self.model.top.parameters():
                assert parameter.grad is not None
                parameter.grad = self._reduce(parameter.grad)
        self.of_tables.step()
        self.of_top.step()
        return loss.item()


class Peer(ABC):
    """One way to keep the tables; it goes on where the last `play` ended.

    Attributes:
        own_seconds: of all batches so far, the time of lookups, gradients and steps, without the
            timed wait and without waits for rows.
        step_seconds: the same with the timed wait.
    """

    def __init__(self) -> None:
        self.own_seconds = self.step_seconds = 0.0

    @abstractmethod
    def play(self, batches: int, *, wait: float) -> list[float]:
        """Train batches, and do all I/O that they cause.

        Args:
            batches: number of batches.
            wait: least seconds from the moment when a batch's rows are there to its last step.

        Returns:
            The losses.
        """

    def moved(self) -> tuple[int, int]:
        """Return the rows that were read from the home so far, and those written back."""
        return 0, 0

    def finish_merges(self) -> None:
        """Wait until the home merges nothing, so that nothing is left to the next peer."""
        return

    def close(self) -> None:
        """Give everything up."""
        return

    def _step(self, trained: _Trained, batch: Batch, sparse: Tensor, wait: float) -> float:
        """Train a batch whose rows are there, and wait for the accelerator."""
        start_s = time.perf_counter()
        loss = trained.train(sparse, batch.label)
        own_s = time.perf_counter() - start_s
        self.own_seconds += own_s
        if own_s < wait:
            time.sleep(wait - own_s)
        self.step_seconds += time.perf_counter() - start_s
        return loss


class AllInMemory(Peer):
    """Plain tables.

    Args:
        rows: name of a table -> its rows.
        batches: the batches.
        fill: gives the tables their values.
        make: makes their optimizer.
        dim: values of a row.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        batches: Sequence[Batch],
        fill: Callable[[TablesModel], object],
        make: MakeOptimizer = row_wise,
        *,
        dim: int = DIM,
    ) -> None:
        super().__init__()
        self.model = TablesModel(rows, dim=dim)
        for table in self.model.tables.values():
            assert isinstance(table, nn.Embedding)
            shape = (table.num_embeddings, dim)
            weight = torch.empty(shape, dtype=torch.float32, device="cpu")
            table.weight = nn.Parameter(weight)
        fill(self.model)
        self.trained = _Trained(self.model, make)
        self._batches = iter(batches)

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        coming = (next(self._batches) for _ in range(batches))
        return [self._step(self.trained, batch, batch.sparse, wait) for batch in coming]


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
        dim: values of a row.
        reduce: see `_Trained`.
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
        dim: int = DIM,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.home = home
        self.model = TablesModel(rows, dim=dim)
        cached(self.model, home, capacity, initial=INITIAL, row_local_optimizers=(RowWiseAdagrad,))
        self.trained = _Trained(self.model, make, reduce)
        cache = cache_of(self.model)
        assert cache is not None
        self.cache: Cache = cache
        optimizer = self.trained.of_tables
        for name, table in self.cache.tables.items():
            if is_filled:
                self.cache.refuse_optimizer(name, optimizer, optimizer.param_groups[0])
                self.cache.mover.put_at_home(table)
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
        """Yield batches whose rows are brought when the batch is asked for."""
        for batch in batches:
            self.cache.end_batch()
            self.cache.plan(self._ids(batch), is_next=True)
            self.cache.begin_batch()
            yield batch

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        losses = self.train(batches, wait=wait)
        self.end_io()
        return losses

    def train(self, batches: int, *, wait: float) -> list[float]:
        """Train batches as `play` does, and leave I/O under way."""
        return [
            self._step(self.trained, batch, batch.sparse, wait)
            for batch in (next(self._reader) for _ in range(batches))
        ]

    def end_io(self) -> None:
        """Wait until no I/O is under way.

        The home thread may be a window ahead, or behind. Rounds begin and end with it idle, so that
        each has the I/O of as many batches as it trains.
        """
        self.cache.mover.thread.submit(lambda: None).result()

    def moved(self) -> tuple[int, int]:
        """See `Peer`."""
        return self.cache.stats.fetched_bytes // self._record_bytes, self.cache.stats.written_rows

    @property
    def _record_bytes(self) -> int:
        layouts = [table.slots.layout for table in self.cache.tables.values()]
        return max(1 if layout is None else layout.size_bytes for layout in layouts)

    def finish_merges(self) -> None:
        """See `Peer`."""
        _finish_merges(self.home)

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
        dim: values of a row.
        at_once: tables whose rows are read or written at the same time.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        batches: Sequence[Batch],
        home: Home,
        *,
        dim: int = DIM,
        at_once: int = 1,
    ) -> None:
        super().__init__()
        self.home = home
        self.moved_rows = 0
        self._dim = dim
        self._threads = ThreadPoolExecutor(at_once)
        most = batches[0].sparse.shape[1]
        self.model = TablesModel(rows, dim=dim)
        self._slots: list[TableSlots] = []
        for name, table in self.model.tables.items():
            assert isinstance(table, nn.Embedding)
            slots = TableSlots(
                f"tables.{name}",
                rows=rows[name],
                capacity=min(most, rows[name]),
                dim=dim,
                dtype=torch.float32,
                device=torch.device("cpu"),
                trained=True,
            )
            table.weight = slots.weight
            self._slots.append(slots)
        self.trained = _Trained(self.model, row_wise)
        for slots in self._slots:
            slots.follow_states({"sum": self.trained.of_tables.state[slots.weight]["sum"]})
            home.add_table(slots.name, rows=slots.rows, record_bytes=slots.fix_layout().size_bytes)
        self._batches = iter(batches)
        self._number = 1

    def play(self, batches: int, *, wait: float) -> list[float]:
        """See `Peer`."""
        losses = []
        for _ in range(batches):
            batch = next(self._batches)
            places = torch.empty_like(batch.sparse)
            moved = list(self._threads.map(self._fetch, self._slots, batch.sparse, places))
            losses.append(self._step(self.trained, batch, places, wait))
            self._number += 1
            list(self._threads.map(self._write_back, self._slots, moved))
            self.moved_rows += sum(len(ids) for ids in moved)
        return losses

    def _fetch(self, slots: TableSlots, looked_up: Tensor, places: Tensor) -> Tensor:
        """Bring the rows of a table into its first slots; return their ids."""
        ids: Tensor
        ids, inverse = torch.unique(looked_up, return_inverse=True)
        places.copy_(inverse)
        size = slots.fix_layout().size_bytes
        records = torch.empty(len(ids), size, dtype=torch.uint8, device="cpu")
        is_present = self.home.fetch(slots.name, ids, records)
        slots_here = _first(len(ids))
        if bool(is_present.all()):
            slots.put(slots_here, records)
        else:
            slots.put(slots_here[is_present], records[is_present])
            slots.put_new(
                slots_here[~is_present],
                INITIAL(slots.name, ids[~is_present], self._dim, torch.float32),
            )
        return ids

    def _write_back(self, slots: TableSlots, ids: Tensor) -> None:
        records = slots.records(_first(len(ids)))
        self.home.write_back(slots.name, ids, records, batch=self._number)

    def moved(self) -> tuple[int, int]:
        """See `Peer`."""
        return self.moved_rows, self.moved_rows

    def finish_merges(self) -> None:
        """See `Peer`."""
        _finish_merges(self.home)

    def close(self) -> None:
        """See `Peer`."""
        self._threads.shutdown(wait=True)
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


def any_values(model: nn.Module) -> None:
    """Give all parameters values of the right size and distribution."""
    for weight in model.parameters():
        weight.data.uniform_(-0.05, 0.05)


def fill_home(home: Home, rows: Mapping[str, int], *, dim: int = DIM, states: int = 1) -> None:
    """Write all rows of the tables to a home, as a restore does: by default row-wise Adagrad's.

    Their values are of the right size and distribution, but repeat.

    Args:
        home: the home.
        rows: name of a table -> its rows.
        dim: values of a row.
        states: F32 values of a row's optimizer state, which are 0.
    """
    generator = torch.Generator().manual_seed(5)
    piece = min(_PIECE_ROWS, max(rows.values()))
    records = torch.zeros(piece, dim + states, dtype=torch.float32, device="cpu")
    records[:, :dim].uniform_(-0.05, 0.05, generator=generator)
    as_bytes = records.view(torch.uint8)
    for name, count in rows.items():
        home.add_table(f"tables.{name}", rows=count, record_bytes=as_bytes.shape[1])
        for first in range(0, count, piece):
            ids = torch.arange(first, min(first + piece, count), dtype=torch.int64, device="cpu")
            home.write_back(f"tables.{name}", ids, as_bytes[: len(ids)], batch=0)
    _finish_merges(home)


def state_in_memory(peer: AllInMemory) -> list[Tensor]:
    """Return the rows and row states of all tables, in order."""
    tensors = []
    for weight in peer.model.weights():
        states = row_states(peer.trained.of_tables.state.get(weight, {}), weight.shape[0])
        tensors += [weight.detach(), *states.values()]
    return tensors


def state_in_cache(cache: Cache) -> list[Tensor]:
    """Return the same as `state_in_memory`, wherever rows are."""
    tensors: list[Tensor] = []
    for name, table in cache.tables.items():
        all_ids = torch.arange(table.slots.rows, dtype=torch.int64, device="cpu")
        tensors += cache.rows_of(name, all_ids)
    return tensors


def same_bits(arrays: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal, bit for bit."""
    return len(arrays) == len(expected) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(arrays, expected, strict=True)
    )


def _finish_merges(home: Home) -> None:
    if not isinstance(home, FileHome):
        return
    while home._merging is not None or (home._failure is None and home._next_merge() is not None):
        time.sleep(0.01)


def _first(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")

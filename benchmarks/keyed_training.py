"""Measures training with keyed tables over the same with `nn.Embedding` and ids mapped beforehand.

The model is the example's DLRM with 26 tables of 16 values, at 2,048 samples, with Adagrad on
sparse gradients. Each table has as many rows as ids are in use, and they are all taken. Ids are
hashes of 64 bits, drawn by a Zipf law. After each 100 batches 1 % of the ids are new, so rows of
old ids leave. The other side looks up the slots that the keyed tables have given to the same ids,
and so pays for neither map nor eviction. Seconds are those of the thread's processor time.

The benchmark `keyed` calls `measure`; `python -m benchmarks.keyed_training` runs it alone.
"""

from __future__ import annotations

from time import thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

from benchmarks.machine import watch
from benchmarks.report import Report, print_report, ratio
from benchmarks.workload import examples_on_path
from recpoint import KeyedEmbedding
from recpoint.embeddings import Uniform

__all__ = ["KEYS", "Ids", "Side", "looked_up_slots", "measure"]

KEYS = ("vs_embedding",)

_TABLES, _DIM, _DENSE = 26, 16, 13
_EXPONENT = 1.05
_BATCHES_EACH = 100  # after so many, some ids are new
_NEW_SHARE = 0.01
_ODD = np.uint64(0x9E3779B97F4A7C15)  # spreads numbers over all 64 bits


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figure `vs_embedding`."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    ids_in_use, samples, batches = (2_000, 64, 12) if smoke else (100_000, 2_048, 300)
    _gate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _measure(report, ids_in_use, samples, batches)
    finally:
        torch.set_num_threads(threads)


class Side:
    """One of the two models, with its optimizers.

    Args:
        rows: of each table.
        keyed: whether its tables are keyed.
        dim: values in a row.
    """

    def __init__(self, rows: int, *, keyed: bool, dim: int = _DIM) -> None:
        examples_on_path()
        from train_dlrm import DLRM

        torch.manual_seed(0)
        self.model: Any = DLRM({f"c{number}": 1 for number in range(_TABLES)}, _DENSE, dim=dim)
        for name in self.model.tables:
            self.model.tables[name] = (
                KeyedEmbedding(dim, rows, initial=Uniform(), sparse=True)
                if keyed
                else nn.Embedding(rows + 1, dim, padding_idx=0, sparse=True)
            )
        dense = [p for name, p in self.model.named_parameters() if not name.startswith("tables")]
        self.optimizers = [
            Adagrad(self.model.tables.parameters(), lr=0.01),
            SGD(dense, lr=0.01),
        ]

    def tables(self) -> list[Any]:
        """Return the tables, in the order of the columns of ids."""
        return list(self.model.tables.values())

    def fill(self, ids: Ids) -> None:
        """Give the ids in use rows of the keyed tables."""
        for column, table in enumerate(self.tables()):
            table(torch.from_numpy(ids.in_use[column].astype(np.int64)))
        self.optimizers[0].step()  # without gradients: the rows of this lookup may leave now

    def step(self, dense: Tensor, ids: Tensor) -> float:
        """Train a batch; return its seconds. `ids` are int64 [samples, tables]."""
        torch.manual_seed(1)  # of the dropout
        start = thread_time()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(dense, ids).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return thread_time() - start


class Ids:
    """Ids of a table each, drawn by a Zipf law, of which some are new after a while."""

    def __init__(self, ids_in_use: int) -> None:
        self._generator = np.random.default_rng(0)
        self._drawn = 0
        self.in_use = self._new(_TABLES * ids_in_use).reshape(_TABLES, ids_in_use)
        weights = np.arange(1, ids_in_use + 1) ** -_EXPONENT
        self._shares = np.cumsum(weights / weights.sum())

    def _new(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        numbers = np.arange(self._drawn, self._drawn + count, dtype=np.uint64)
        self._drawn += count
        return numbers * _ODD

    def renew(self) -> None:
        """Put new ids in the places of a share of them."""
        count = max(1, int(_NEW_SHARE * self.in_use.shape[1]))
        for ids in self.in_use:
            ids[self._generator.choice(len(ids), count, replace=False)] = self._new(count)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return dense values [samples, 13] and ids, int64 [samples, tables]."""
        ranks = np.searchsorted(self._shares, self._generator.random((_TABLES, samples)))
        ids = np.take_along_axis(self.in_use, np.minimum(ranks, self.in_use.shape[1] - 1), axis=1)
        dense = torch.from_numpy(self._generator.random((samples, _DENSE), dtype=np.float32))
        return dense, torch.from_numpy(ids.T.astype(np.int64))


def looked_up_slots(keyed: Side, ids: Tensor) -> Tensor:
    """Return the slots that keyed tables have given to ids, int64 [samples, tables]."""
    columns = [table.slots.find(ids[:, c]) for c, table in enumerate(keyed.tables())]
    return torch.stack(columns, dim=1)


def _gate() -> None:
    """Raise AssertionError if both sides do not compute the same bits while no row leaves."""
    ids, keyed, plain = Ids(50), Side(50, keyed=True), Side(50, keyed=False)
    batches = [ids.batch(40) for _ in range(3)]
    for _, keys in batches:
        for column, table in enumerate(keyed.tables()):
            table(keys[:, column])
    with torch.no_grad():
        for own_table, table in zip(keyed.tables(), plain.tables(), strict=True):
            table.weight.copy_(own_table.weight)
    for dense, keys in batches:
        plain.step(dense, looked_up_slots(keyed, keys))
        keyed.step(dense, keys)
    parameters = zip(keyed.model.parameters(), plain.model.parameters(), strict=True)
    if not all(torch.equal(own, other) for own, other in parameters):
        raise AssertionError("keyed tables: other bits than nn.Embedding's")


def _measure(report: Report, ids_in_use: int, samples: int, batches: int) -> None:
    ids = Ids(ids_in_use)
    keyed, plain = Side(ids_in_use, keyed=True), Side(ids_in_use, keyed=False)
    keyed.fill(ids)
    keyed_s: list[float] = []
    plain_s: list[float] = []
    for batch in range(batches):
        if batch % _BATCHES_EACH == 0:
            ids.renew()
        dense, keys = ids.batch(samples)
        keyed_seconds = keyed.step(dense, keys)
        plain_seconds = plain.step(dense, looked_up_slots(keyed, keys))
        if batch >= min(20, batches // 2):  # the first steps warm up
            keyed_s.append(keyed_seconds)
            plain_s.append(plain_seconds)
    report.timed("step, keyed tables", keyed_s)
    report.timed("step, nn.Embedding", plain_s)
    report.put("vs_embedding", ratio(plain_s, keyed_s))
    inserted = sum(table.counts.inserted for table in keyed.tables()) / _TABLES - ids_in_use
    report.notes.append(
        f"Training: {inserted / batches:.1f} new keys a batch and table got rows of others."
    )


if __name__ == "__main__":
    alone = Report(name="keyed_training", columns=("does",))
    with watch() as watched:
        measure(alone, smoke=False)
    print_report(alone, smoke=False, busy=watched.busy)

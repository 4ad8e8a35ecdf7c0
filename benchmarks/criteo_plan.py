"""Draws batches of Criteo's shape, and counts the rows that a planned cache moves for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cache_peers import INITIAL, Batch, TablesModel
from benchmarks.workload import examples_on_path
from recpoint.embeddings import cached, local
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.lookahead.oracle import Oracle
from recpoint.trainer_plugin.state.lookahead import fetched_batches

__all__ = ["Plan", "criteo_reader", "drawn", "new_rows", "plan_alone"]


def criteo_reader(*, lines: int, rows: int, seed: int = 0) -> Any:
    """Return a reader of so many samples a batch, with tables of so many rows at most."""
    examples_on_path()
    from criteo import CriteoShapeReader

    return CriteoShapeReader(lines=lines, rows=rows, seed=seed)


def drawn(reader: Any, numbers: range) -> list[Batch]:
    """Return these batches of a reader."""
    all_batches = (reader.batch(number) for number in numbers)
    return [Batch(batch.sparse.t().contiguous(), batch.label) for batch in all_batches]


def new_rows(batches: Sequence[Tensor], first: int) -> int:
    """Return how many different rows of a table come in no batch before `first`."""
    ids_before = torch.cat([torch.empty(0, dtype=torch.int64), *batches[:first]])
    ids_after = torch.cat([torch.empty(0, dtype=torch.int64), *batches[first:]])
    return int((~torch.isin(ids_after.unique(), ids_before)).sum())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a plan moves.

    Attributes:
        fetched: rows that enter the cache for each batch.
        written: rows that leave it for each batch.
        seconds: of all plans.
    """

    fetched: list[int]
    written: list[int]
    seconds: float


def plan_alone(
    rows: Mapping[str, int], batches: Sequence[Tensor], *, capacity: int, window: int
) -> Plan:
    """Plan batches as a cache does, with a window that is always full. No row is moved.

    Args:
        rows: name of a table -> its rows.
        batches: ids of each batch, I64 [tables, n].
        capacity: slots of all tables.
        window: window of the Lookahead.

    Raises:
        RuntimeError: a batch needs more slots than there are.
    """
    oracles = [Oracle(slots) for slots in _slots(rows, capacity)]
    fetched, written = [0] * len(batches), [0] * len(batches)
    start_s = time.perf_counter()
    for now in range(1, len(batches) + 1):
        last_batch = min(len(batches), now + window - 1)
        for table, oracle in enumerate(oracles):
            while oracle.expected < last_batch:
                oracle.expect(batches[oracle.expected][table])
            while oracle.planned < min(last_batch, now + fetched_batches(window) - 1):
                step = oracle.plan(batches[oracle.planned][table])
                if step is None:
                    if oracle.planned < now:
                        raise RuntimeError(f"{oracle.capacity} slots are too few for a batch")
                    break
                fetched[step.batch - 1] += len(step.fetched_ids)
                written[step.batch - 1] += len(step.evicted_ids)
            oracle.release(now)
    seconds = time.perf_counter() - start_s
    return Plan(fetched=fetched, written=written, seconds=seconds)


def _slots(rows: Mapping[str, int], capacity: int) -> list[int]:
    """Return the slots that a cache gives to each table."""
    model = TablesModel(rows)
    with local() as home:
        cached(model, home, capacity, initial=INITIAL)
        cache = cache_of(model)
        assert cache is not None
        cache.close()
        return [table.slots.capacity for table in cache.tables.values()]

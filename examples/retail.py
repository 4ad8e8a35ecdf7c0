"""Reads the bundled purchase log of a UK online shop (examples/data/README.md) as a training task.

The task: will this customer put this item into the basket now? Each purchase in the log is a
positive sample. Its negative sample is the same line with an item drawn from the 20,000 lines
before it, so that popularity, season and stock do not reveal the label. Lines stay in the order of
time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from batches import Batch, hash_keys, hash_rows

__all__ = ["DATA_PATH", "RetailReader"]

DATA_PATH = Path(__file__).parent / "data" / "online_retail.npz"

NEGATIVE_WINDOW_LINES = 20_000
#: Rows of tables of keys: fewer than the log has customers and items.
MOST_KEYED_CUSTOMERS = 2000
MOST_KEYED_ITEMS = 3000
HOURS = 24
WEEKDAYS = 7
_FIRST_LINE_MINUTE = 8 * 60 + 26  # the log starts on Wednesday, 2010-12-01, at 08:26
_FIRST_LINE_WEEKDAY = 2

_Ids = npt.NDArray[np.int64]


class RetailReader:
    """Reads batches of 2 * `lines` samples: `lines` purchases, then a negative for each of them.

    Args:
        lines: purchases in each batch; the last batch of the log may have fewer.
        rows: rows of the two tables for crossed columns; other tables have a row for each id.
        seed: of the generator that draws negatives; ids do not depend on the seed.
        path: of the log.
        keyed: ids of customers, items and crossed columns are keys of 64 bits: the shop's number of
            a customer, and hashes of product codes and pairs. Their tables have room for some of
            the keys only.
        rank, ranks: of this process, and the number of ranks; each rank reads every `ranks`-th
            batch. Several ranks leave out the end of the log if it is not a batch for each of them.

    Attributes:
        keyed_tables: names of the tables that are looked up by keys.
    """

    dense_width = 0

    def __init__(
        self,
        *,
        lines: int = 512,
        rows: int = 1 << 18,
        seed: int = 0,
        path: Path = DATA_PATH,
        keyed: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        with np.load(path) as log:
            bought = log["quantity"] > 0
            invoice = log["invoice"][bought]
            minute = log["t_min"][bought].astype(np.int64) + _FIRST_LINE_MINUTE
            customers, items = len(log["customer_original_id"]), len(log["item_code"])
            countries = len(log["country_name"])
            if keyed:
                self._customer = log["customer_original_id"].astype(np.int64)[
                    log["customer"][bought]
                ]
                self._item = _code_keys(log["item_code"])[log["item"][bought]]
                customers, items = MOST_KEYED_CUSTOMERS, MOST_KEYED_ITEMS
            else:
                self._customer = _permuted(log["customer"][bought], customers, column=0)
                self._item = _permuted(log["item"][bought], items, column=1)
            self._country = _permuted(log["country"][bought], countries, column=3)
        # The item bought just before in the same basket; `items` means "first in the basket".
        self._previous = np.full(len(invoice), items, np.int64)
        same_basket = invoice[1:] == invoice[:-1]
        self._previous[1:][same_basket] = self._item[:-1][same_basket]
        self._hour = minute // 60 % HOURS
        self._weekday = (minute // (24 * 60) + _FIRST_LINE_WEEKDAY) % WEEKDAYS

        self.tables = {
            "customer": customers,
            "item": items,
            "previous_item": items + 1,
            "country": countries,
            "hour": HOURS,
            "weekday": WEEKDAYS,
            "customer_x_item": rows,
            "previous_x_item": rows,
        }
        names = ("customer", "item", "previous_item", "customer_x_item", "previous_x_item")
        self.keyed_tables = frozenset(names if keyed else ())
        self.total_batches = (
            -(-len(invoice) // lines) if ranks == 1 else (len(invoice) // (ranks * lines))
        )
        self._lines, self._rows, self._items = lines, rows, items
        self._seed, self._rank, self._ranks = seed, rank, ranks
        self._generator = _generator(seed, rank, ranks, 0)
        self._lines_done = 0  # by all ranks; lines, because a restart may change the batch size

    def __iter__(self) -> Iterator[Batch]:
        needed = 1 if self._ranks == 1 else self._ranks * self._lines
        while self._lines_done + needed <= len(self._item):
            yield self._next()

    def _next(self) -> Batch:
        start = self._lines_done + self._rank * self._lines
        lines = np.arange(start, min(start + self._lines, len(self._item)))
        window = np.minimum(lines, NEGATIVE_WINDOW_LINES)
        lines_back = self._generator.integers(0, np.maximum(window, 1), dtype=np.int64) + (
            window > 0
        )
        # Set before the batch is returned, so that a state taken after training on the batch points
        # to the next batch.
        self._lines_done = min(self._lines_done + self._ranks * self._lines, len(self._item))
        sparse = np.concatenate(
            [self._columns(lines, lines), self._columns(lines, lines - lines_back)]
        )
        label = torch.zeros(len(sparse))
        label[: len(lines)] = 1
        return Batch(torch.empty(len(sparse), 0), torch.from_numpy(sparse), label)

    def _columns(self, positions: _Ids, item_at: _Ids) -> _Ids:
        """Return the columns of lines `positions`, with items of lines `item_at`: I64 [n, 8]."""
        customer, previous, item = (
            self._customer[positions],
            self._previous[positions],
            self._item[item_at],
        )
        columns = (
            customer,
            item,
            previous,
            self._country[positions],
            self._hour[positions],
            self._weekday[positions],
            self._crossed(customer, item, column=6),
            self._crossed(previous, item, column=7),
        )
        return np.stack(columns, axis=1)

    def _crossed(self, first: _Ids, item: _Ids, *, column: int) -> _Ids:
        if self.keyed_tables:
            return hash_keys(first, item, column=column)
        pairs = (first * self._items + item).view(np.uint64)
        return hash_rows(pairs, column=column, rows=self._rows)

    def state_dict(self) -> dict[str, object]:
        """Return the reader's position between two batches."""
        return {
            "lines_done": self._lines_done,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue after the last batch that was read before `state` was taken."""
        lines_done, generator = state["lines_done"], state["generator"]
        if not isinstance(lines_done, int) or not 0 <= lines_done <= len(self._item):
            raise ValueError(f"line {lines_done!r} of a log of {len(self._item)} purchases")
        if not isinstance(generator, dict):
            raise ValueError("the generator's state is not a dictionary")
        self._generator.bit_generator.state = generator
        self._lines_done = lines_done

    def load_state_dicts(self, states: Sequence[dict[str, object]], rank: int, ranks: int) -> None:
        """Continue after the lines that all ranks of a checkpoint have read, with other ranks.

        No purchase is lost or read twice; negatives are drawn anew.
        """
        lines_of_ranks = {state["lines_done"] for state in states}
        if len(lines_of_ranks) != 1:
            raise ValueError(
                f"the ranks stopped at different lines: {sorted(map(str, lines_of_ranks))}"
            )
        if (rank, ranks) != (self._rank, self._ranks):
            raise ValueError(
                f"the reader of rank {self._rank} of {self._ranks}, not {rank} of {ranks}"
            )
        (lines_done,) = lines_of_ranks
        assert isinstance(lines_done, int)
        generator = _generator(self._seed, rank, ranks, lines_done)
        self.load_state_dict({**states[0], "generator": generator.bit_generator.state})


def _generator(seed: int, rank: int, ranks: int, lines_done: int) -> np.random.Generator:
    alone = ranks == 1 and lines_done == 0
    return np.random.Generator(np.random.PCG64(seed if alone else [seed, rank, lines_done]))


def _code_keys(codes: npt.NDArray[np.str_]) -> _Ids:
    """Hash product codes, such as 85123A, to keys of 64 bits."""
    hashes = [hashlib.blake2b(code.encode(), digest_size=8).digest() for code in codes.tolist()]
    return np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)


def _permuted(ids: npt.NDArray[np.integer], count: int, *, column: int) -> _Ids:
    """Shuffle ids: the log numbers them by first appearance, and real systems do not."""
    order: _Ids = np.random.default_rng(column).permutation(count)
    permuted: _Ids = order[ids]
    return permuted

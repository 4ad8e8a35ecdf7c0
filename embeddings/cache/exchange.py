"""Sends values of rows to the ranks that borrow them, and their gradients to the rows' owners.

A gradient is divided by the number of ranks, as DistributedDataParallel does. The owner adds the
gradients of all ranks in rank order, whoever sends first. So sums have the same bits in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.home.channel import Channel
from recpoint.lookahead.shared_oracle import Exchange, Rows

__all__ = [
    "LocalGradient",
    "Outgoing",
    "Reduced",
    "counts_of",
    "divided",
    "exchange_values",
    "merged",
]

#: What gradient a rank has for a table: each rank sends one of these as a byte.
_NONE: Final = 0
_DENSE: Final = 1
_SPARSE: Final = 2


def exchange_values(channel: Channel, tables: Sequence[tuple[TableSlots, Exchange]]) -> None:
    """Send values of lent rows to the ranks that borrow them, and put borrowed rows into slots.

    Args:
        channel: for this purpose alone; collective.
        tables: slots and exchange of each table, in the same order on all ranks.
    """
    parts, sizes = [], []
    for rank in range(channel.count):
        sent = [_values(slots, exchange.lent[rank].slots) for slots, exchange in tables]
        parts.append(torch.cat(sent) if sent else _nothing())
        sizes.append(
            sum(
                exchange.borrowed[rank].ids.numel() * _row_bytes(slots)
                for slots, exchange in tables
            )
        )
    for rank, received in enumerate(channel.swap(parts, sizes)):
        end = 0
        for slots, exchange in tables:
            rows = exchange.borrowed[rank]
            first, end = end, end + rows.ids.numel() * _row_bytes(slots)
            if end == first:
                continue
            values = received[first:end].clone().view(slots.weight.dtype).view(-1, slots.dim)
            _, weight = slots.arrays()[0]
            weight.index_copy_(0, rows.slots.to(weight.device), values.to(weight.device))


def _values(slots: TableSlots, chosen_slots: Tensor) -> Tensor:
    _, weight = slots.arrays()[0]
    return _bytes(weight.index_select(0, chosen_slots.to(weight.device)).cpu())


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _row_bytes(slots: TableSlots) -> int:
    return slots.dim * slots.weight.element_size()


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def counts_of(by_table: Sequence[Sequence[Rows]], ranks: int) -> Tensor:
    """Return how many rows there are of each rank for each table: int64 [ranks, tables].

    Args:
        by_table: for each table the rows of each rank.
        ranks: number of ranks.
    """
    counts = [[rows[rank].ids.numel() for rows in by_table] for rank in range(ranks)]
    return torch.tensor(counts, dtype=torch.int64, device="cpu").view(ranks, len(by_table))


def merged(exchanges: Sequence[Exchange]) -> Exchange:
    """Return the rows that a rank exchanges in several batches, between which no row moves."""
    if len(exchanges) == 1:
        return exchanges[0]
    return Exchange(
        batch=exchanges[-1].batch,
        own=_together([exchange.own for exchange in exchanges]),
        borrowed=tuple(
            map(_together, zip(*(exchange.borrowed for exchange in exchanges), strict=True))
        ),
        lent=tuple(map(_together, zip(*(exchange.lent for exchange in exchanges), strict=True))),
    )


def divided(exchange: Exchange, ids: Tensor) -> tuple[Exchange, Exchange]:
    """Return the part of an exchange with these ids, int64 [k], ascending, and the part without."""
    parts = []
    for is_chosen in (True, False):
        parts.append(
            Exchange(
                batch=exchange.batch,
                own=_chosen(exchange.own, ids, is_chosen),
                borrowed=tuple(_chosen(rows, ids, is_chosen) for rows in exchange.borrowed),
                lent=tuple(_chosen(rows, ids, is_chosen) for rows in exchange.lent),
            )
        )
    return parts[0], parts[1]


def _chosen(rows: Rows, ids: Tensor, is_chosen: bool) -> Rows:
    if not ids.numel():
        return Rows(ids=rows.ids[:0], slots=rows.slots[:0]) if is_chosen else rows
    positions = torch.searchsorted(ids, rows.ids).clamp_(max=ids.numel() - 1)
    chosen = (ids[positions] == rows.ids) == is_chosen
    return Rows(ids=rows.ids[chosen], slots=rows.slots[chosen])


def _together(rows: Sequence[Rows]) -> Rows:
    ids, inverse = torch.unique(torch.cat([part.ids for part in rows]), return_inverse=True)
    slots = torch.empty_like(ids)
    slots[inverse] = torch.cat([part.slots for part in rows])
    return Rows(ids=ids, slots=slots)


class Reduced(NamedTuple):
    """The gradient of all ranks for the rows of one table that this rank owns.

    Attributes:
        is_sparse: the ranks have sparse gradients.
        slots: int64 [n]: slots of the rows that any rank looks up, in the order of their ids.
        values: [n, dim]: the sums over all ranks, on the CPU.
        has_gradient: bool [n]: a rank has an entry for the row. True for dense gradients.
    """

    is_sparse: bool
    slots: Tensor
    values: Tensor
    has_gradient: Tensor


class LocalGradient:
    """The gradient that the weight of one table has on this rank, divided by the number of ranks.

    Args:
        slots: slots of the table.
        ranks: number of ranks.

    Attributes:
        slots: as given.
        kind: the kind of gradient, a number.
    """

    def __init__(self, slots: TableSlots, ranks: int) -> None:
        gradient = slots.weight.grad
        self.slots = slots
        self._ranks = ranks
        self._dense: Tensor | None = None
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values = torch.empty(0, slots.dim, dtype=slots.weight.dtype, device="cpu")
        self.kind = _NONE
        if gradient is None:
            return
        if gradient.is_sparse:
            self.kind = _SPARSE
            summed = slots.by_ids(gradient).coalesce()
            self._ids = summed._indices()[0].cpu()
            self._values = summed._values().cpu() / ranks
        else:
            self.kind = _DENSE
            self._dense = gradient

    def of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return which rows have a gradient, bool [n], and the gradients, [n, dim], on the CPU."""
        count = rows.ids.numel()
        if self._dense is not None:
            positions = rows.slots.to(self._dense.device)
            values = self._dense.index_select(0, positions).cpu() / self._ranks
            return torch.ones(count, dtype=torch.bool, device="cpu"), values
        values = torch.zeros(count, self.slots.dim, dtype=self._values.dtype, device="cpu")
        is_reduced = torch.zeros(count, dtype=torch.bool, device="cpu")
        if count and self._ids.numel():
            positions = torch.searchsorted(self._ids, rows.ids).clamp_(max=self._ids.numel() - 1)
            is_reduced = self._ids[positions] == rows.ids
            values[is_reduced] = self._values[positions[is_reduced]]
        return is_reduced, values


class Outgoing:
    """Copies of the gradients that this rank sends to the owners of rows, and of its own.

    Args:
        rank: this rank.
        ranks: number of ranks.
        tables: gradient and exchange of each table, in the same order on all ranks.

    Attributes:
        sent_rows: int64 [ranks, tables]: of how many rows each rank is sent gradients.
        awaited_rows: int64 [ranks, tables]: of how many rows each rank sends gradients here.
    """

    def __init__(
        self, rank: int, ranks: int, tables: Sequence[tuple[LocalGradient, Exchange]]
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._tables = [(local.slots, exchange) for local, exchange in tables]
        self._own_parts = [local.of(exchange.own) for local, exchange in tables]
        exchanges = [exchange for _, exchange in tables]
        self.sent_rows = counts_of([exchange.borrowed for exchange in exchanges], ranks)
        self.awaited_rows = counts_of([exchange.lent for exchange in exchanges], ranks)
        kinds = torch.tensor([local.kind for local, _ in tables], dtype=torch.uint8, device="cpu")
        self._parts: list[Tensor] = []
        for receiver in range(ranks):
            sent = [kinds]
            for local, exchange in tables:
                has_gradient, values = local.of(exchange.borrowed[receiver])
                sent += [has_gradient.view(torch.uint8), _bytes(values)]
            self._parts.append(torch.cat(sent))

    def reduce(self, channel: Channel) -> list[Reduced | None]:
        """Send them, and add up what all ranks have for the rows that this rank owns. Collective.

        Args:
            channel: for this purpose alone.

        Returns:
            For each table its gradient; None: no rank has one.
        """
        count = len(self._tables)
        sizes = [
            count
            + sum(
                exchange.lent[rank].ids.numel() * (1 + _row_bytes(slots))
                for slots, exchange in self._tables
            )
            for rank in range(self._ranks)
        ]
        received = channel.swap(self._parts, sizes)
        kinds = torch.stack([message[:count] for message in received]).amax(0).tolist()
        ends = [count] * self._ranks
        all_reduced: list[Reduced | None] = []
        for (slots, exchange), own_parts, kind in zip(
            self._tables, self._own_parts, kinds, strict=True
        ):
            ids = exchange.own.ids
            values = torch.zeros(ids.numel(), slots.dim, dtype=slots.weight.dtype, device="cpu")
            has_gradient = torch.full(ids.shape, kind == _DENSE, dtype=torch.bool, device="cpu")
            for rank in range(self._ranks):
                if rank == self._rank:
                    is_in_part, part = own_parts
                    positions = torch.arange(ids.numel(), dtype=torch.int64, device="cpu")
                else:
                    rows = exchange.lent[rank]
                    first, middle = ends[rank], ends[rank] + rows.ids.numel()
                    ends[rank] = middle + rows.ids.numel() * _row_bytes(slots)
                    is_in_part = received[rank][first:middle].bool()
                    part = received[rank][middle : ends[rank]].clone().view(values.dtype)
                    part = part.view(-1, slots.dim)
                    positions = torch.searchsorted(ids, rows.ids)
                values.index_add_(0, positions, part)
                has_gradient[positions] |= is_in_part
            reduced = Reduced(kind == _SPARSE, exchange.own.slots, values, has_gradient)
            all_reduced.append(None if kind == _NONE else reduced)
        return all_reduced

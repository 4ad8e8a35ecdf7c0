"""Finds out which rows of this rank the batches until a checkpoint look up, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from torch import Tensor

from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.home.channel import Channel
from recpoint.lookahead.owned_rows import OwnedRows, own_ids
from recpoint.trainer_plugin.ranks.row_exchange import ComingBatches, RowExchange
from recpoint.trainer_plugin.state.lookahead import Lookahead

__all__ = ["BatchIds", "ComingRows", "WindowRows"]

#: For each batch: `Table.key` -> ids in this rank's shard.
BatchIds = Sequence[Mapping[str, Tensor]]

#: How long to wait, at the end, for an exchange with the other ranks.
_END_SECONDS: Final = 10.0


class WindowRows(NamedTuple):
    """The rows of this rank that the batches until a checkpoint look up.

    Attributes:
        batches_done: batches done before the first of these batches.
        batches: the rows that each batch looks up, as soon as they are known; or `RowsUnknown`.
    """

    batches_done: int
    batches: Future[BatchIds]

    @property
    def are_unknown(self) -> bool:
        """Whether it is known that they will not be known."""
        return self.batches.done() and self.batches.exception() is not None


class ComingRows:
    """The rows of this rank that coming batches look up. Used by the training thread only.

    Several ranks tell each other of their batches, each after the same batch: for the first time
    `window` batches before a checkpoint, or when its interval begins. If some rank had not read all
    batches until the checkpoint, they do it again at half the distance, and so on.

    Args:
        reader: reads ahead of training on this rank.
        owned: for each rank, the rows that it stores.
        rank: this rank.
        channel: to the other ranks, for this object alone; None: there are no others.
        rows_of_keys: name of a keyed table -> returns the rows that some keys have now, which are
            the same on all ranks.
    """

    def __init__(
        self,
        reader: Lookahead,
        owned: Sequence[Sequence[OwnedRows]],
        *,
        rank: int = 0,
        channel: Channel | None = None,
        rows_of_keys: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> None:
        self._reader = reader
        self._rows_of_keys = rows_of_keys
        self._own_rows = owned[rank]
        self._channel = channel
        self._exchange = None if channel is None else RowExchange(channel, owned)
        self._thread: CallThread | None = None
        self._due_step = -1
        self._next_distance = 0  # batches before the checkpoint at which ranks tell next
        self._answers: list[WindowRows] = []
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the batches that are read ahead."""
        return self._reader.held_bytes

    def has_work(self, batches_done: int, batches_to_come: int) -> bool:
        """Whether to call `tell`, or whether a window may open.

        Args:
            batches_done: batches done.
            batches_to_come: batches until the next checkpoint.
        """
        self._follow(batches_done + batches_to_come)
        is_told_next = self._exchange is not None and 0 < batches_to_come <= self._next_distance
        return is_told_next or self.are_coming(batches_to_come)

    def are_coming(self, batches_to_come: int) -> bool:
        """Whether `rows` has the rows of all batches until the next checkpoint, or may have."""
        if self._exchange is None:
            window = min(self._reader.window, self._reader.untrained)
            return 0 < batches_to_come <= window
        return batches_to_come > 0 and not all(rows.are_unknown for rows in self._answers)

    def tell(self, batches_done: int, batches_to_come: int) -> None:
        """Tell other ranks of this rank's batches, if it is time to; waits for none of them."""
        self._follow(batches_done + batches_to_come)
        if self._exchange is None or not 0 < batches_to_come <= self._next_distance:
            return
        while self._next_distance >= batches_to_come:
            self._next_distance //= 2
        if self._thread is None:
            self._thread = CallThread("recpoint-coming-rows")
        ids = [self._by_rows(ids) for ids in self._reader.next_ids(batches_to_come)]
        coming = ComingBatches(self._due_step, batches_done, ids)
        answer = self._thread.submit(partial(self._exchange.tell, coming))
        self._answers.append(WindowRows(batches_done, answer))

    def _follow(self, due_step: int) -> None:
        """Begin anew if another checkpoint is next."""
        if due_step != self._due_step:
            self._due_step = due_step
            self._next_distance = self._reader.window
            self._answers.clear()

    def rows(self, batches_done: int, batches_to_come: int) -> WindowRows:
        """Return the rows of the batches until the next checkpoint; `are_coming` is true."""
        if self._exchange is not None:
            return next(rows for rows in self._answers if not rows.are_unknown)
        answer: Future[BatchIds] = Future()
        batches = [self._by_rows(ids) for ids in self._reader.next_ids(batches_to_come)]
        answer.set_result(own_ids(batches, self._own_rows))
        return WindowRows(batches_done, answer)

    def _by_rows(self, ids: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the ids of a batch with the rows of keyed tables in place of their keys.

        Keys may get other rows until then: marks tell which rows have changed.
        """
        rows_of_keys = self._rows_of_keys
        return {
            name: rows_of_keys[name](table_ids) if name in rows_of_keys else table_ids
            for name, table_ids in ids.items()
        }

    def close(self) -> None:
        """Leave the other ranks."""
        if self._channel is None or self._is_closed:
            return
        self._is_closed = True
        if self._thread is None:
            self._channel.close()
        else:
            self._thread.submit(self._channel.close)
            self._thread.end(within_seconds=_END_SECONDS)

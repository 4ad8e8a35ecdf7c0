"""Tells each rank the ids of coming batches of all ranks.

While a batch is trained, a thread of each rank exchanges the ids of the batches that were read
since the last exchange. A rank uses the result from its next batch on, or at once if it knows no
other batch. So all ranks know the same batches when they plan, and training rarely waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.home.channel import Channel
from recpoint.errors import RanksDiffer, SettingsError

__all__ = ["ComingIds", "Reading"]

#: Ids of one batch: name of a table -> for each rank int64 [n], ascending, all different.
_Ids = dict[str, list[Tensor]]

#: Batch that training is at, turn, window, first batch told, number of batches, last batch that is
#: over.
_HEADER: Final = 6


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """What all ranks said in one exchange.

    Attributes:
        last_told: the last batch that each rank has told.
        over: the last batch whose training is over on all ranks.
        batches: for each rank: number of a batch -> ids, int64 [n], for each table.
    """

    last_told: tuple[int, ...]
    over: int
    batches: tuple[dict[int, tuple[Tensor, ...]], ...]


class Reading(NamedTuple):
    """How a rank reads ahead.

    Attributes:
        turn: how many times the cache has turned to another reader.
        window: the reader's window, in batches.
    """

    turn: int
    window: int


class _IdsMessage(NamedTuple):
    """What one rank said: see `_HEADER`, and the ids of each batch for each table."""

    last_batch: int
    turn: int
    window: int
    first: int
    over: int
    batches: list[tuple[Tensor, ...]]


class ComingIds:
    """The ids of coming batches of all ranks. The same calls must be made on each rank.

    Batches are numbered as the cache numbers them.

    Args:
        channel: for this object alone.
        rows: name of a table -> its number of rows.
        last: number of the last batch that was handed out.

    Attributes:
        over: the last batch whose training is over on all ranks, as far as this is known.
        last_known: the last batch whose ids are known.
    """

    def __init__(self, channel: Channel, rows: Mapping[str, int], *, last: int) -> None:
        self._channel = channel
        self._rows = dict(rows)
        self._thread = CallThread("recpoint-coming-ids")
        self._pending: list[Future[_Answers]] = []
        self.over = 0
        self.forget(last)

    def forget(self, last: int) -> None:
        """Forget all batches after `last`, which was handed out."""
        self._pending.clear()
        self._last_told: tuple[int, ...] = (last,) * self._channel.count
        self.last_known = self._last_own = last
        #: For each rank: number of a batch -> ids for each table.
        self._batches: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in self._last_told]

    @property
    def last_told(self) -> int:
        """Number of the last batch that this rank has told."""
        return self._last_own

    def of(self, batch: int) -> _Ids:
        """Return the ids of a batch that is known."""
        by_rank = [by_batch[batch] for by_batch in self._batches]
        return {
            name: [ids[position] for ids in by_rank] for position, name in enumerate(self._rows)
        }

    def drop(self, batch: int) -> None:
        """Forget the ids of batches up to this one."""
        for by_batch in self._batches:
            for number in [number for number in by_batch if number <= batch]:
                del by_batch[number]

    def tell(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        last_batch: int,
        reading: Reading,
        over: int,
        waits: bool,
    ) -> None:
        """Tell all ranks of batches that were read on this rank, and learn of theirs.

        Args:
            batches: the batches after `last_told`, in order: name of a table -> ids, int32 or int64
                [n], on the CPU, within the table.
            last_batch: the last batch that was handed out on this rank.
            reading: how this rank reads ahead.
            over: the last batch whose training is over on this rank.
            waits: whether to wait for what the ranks tell in this very call.

        Raises:
            RanksDiffer: the ranks are at different batches, or read them in different ways.
            RankLost: a rank did not answer.
        """
        first = self._last_own + 1
        self._last_own += len(batches)
        self._pending.append(
            self._thread.submit(
                partial(self._exchanged, list(batches), last_batch, reading, first, over)
            )
        )
        while len(self._pending) > (0 if waits else 1):
            answers = self._pending[0].result()
            del self._pending[0]
            for by_batch, new in zip(self._batches, answers.batches, strict=True):
                by_batch.update(new)
            self.over = max(self.over, answers.over)
            self._last_told = answers.last_told
            self.last_known = min(answers.last_told)

    def refuse_uneven(self, last: int) -> None:
        """Raise an error if some ranks have a batch after `last` and others have none.

        Raises:
            SettingsError: says which.
        """
        ended = [rank for rank, last_told in enumerate(self._last_told) if last_told <= last]
        if ended and len(ended) < len(self._last_told):
            raise SettingsError(
                f"the readers of {len(self._last_told)} ranks",
                found=f"no further batch on ranks {ended}, and more batches on the others",
                expected="the same number of batches on each rank, because ranks share rows",
                next_step="divide the data evenly, as torch's DistributedSampler(drop_last=True) "
                "does; or see why a reader has failed",
            )

    def leave(self) -> None:
        """Leave the other ranks once the exchanges that were begun have ended. Does not wait."""
        self._thread.submit(self._channel.close)

    def end(self, *, within_seconds: float) -> bool:
        """End the thread, and close its channel once it has ended; see `CallThread.end`."""
        has_ended = self._thread.end(within_seconds=within_seconds)
        if has_ended:
            self._channel.close()
        return has_ended

    def _exchanged(
        self,
        batches: list[Mapping[str, Tensor]],
        last_batch: int,
        reading: Reading,
        first: int,
        over: int,
    ) -> _Answers:
        try:
            return self._exchange(batches, last_batch, reading, first, over)
        except BaseException:
            self._channel.close()  # what is left of this exchange must not meet the next one
            raise

    def _exchange(
        self,
        batches: list[Mapping[str, Tensor]],
        last_batch: int,
        reading: Reading,
        first: int,
        over: int,
    ) -> _Answers:
        # By this thread, because it takes a while.
        own_ids = [
            torch.unique(batch[name]).long() if name in batch else torch.empty(0, dtype=torch.int64)
            for batch in batches
            for name in self._rows
        ]
        counts = [ids.numel() for ids in own_ids]
        header = torch.tensor(
            [last_batch, *reading, first, len(batches), over, *counts],
            dtype=torch.int64,
            device="cpu",
        )
        width = torch.int32 if max(self._rows.values()) <= 1 << 31 else torch.int64
        ids = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *own_ids]).to(width)
        sent = torch.cat([header.view(torch.uint8), ids.view(torch.uint8)])
        messages = [
            self._parsed(message_bytes, width) for message_bytes in self._channel.gather(sent)
        ]
        _refuse_differing(messages)
        return _Answers(
            last_told=tuple(message.first + len(message.batches) - 1 for message in messages),
            over=min(message.over for message in messages),
            batches=tuple(dict(enumerate(message.batches, message.first)) for message in messages),
        )

    def _parsed(self, sent: Tensor, width: torch.dtype) -> _IdsMessage:
        # Cloned, because numbers must lie at addresses that fit their size.
        last_batch, turn, window, first, count, over = (
            sent[: 8 * _HEADER].clone().view(torch.int64).tolist()
        )
        end = 8 * (_HEADER + count * len(self._rows))
        counts = sent[8 * _HEADER : end].clone().view(torch.int64).tolist()
        parts = sent[end:].clone().view(width).long().split(counts)
        step = len(self._rows)
        batches = [parts[index * step : (index + 1) * step] for index in range(count)]
        return _IdsMessage(last_batch, turn, window, first, over, batches)


def _refuse_differing(messages: Sequence[_IdsMessage]) -> None:
    if len({message.window for message in messages}) > 1:
        raise RanksDiffer(
            "Lookahead.window",
            found=f"{[message.window for message in messages]} on ranks 0 to {len(messages) - 1}",
            expected="the same window on all ranks, because each plans the caches of all",
            next_step="build the Lookahead with one window on all ranks",
        )
    if len({(message.last_batch, message.turn) for message in messages}) > 1:
        batch_counts = [message.last_batch - 1 for message in messages]
        raise RanksDiffer(
            "the batches of all ranks",
            found=f"ranks that were given {batch_counts} batches"
            if len(set(batch_counts)) > 1
            else "ranks that read with different Lookaheads",
            expected="ranks that begin epochs, evaluate and restore at the same batches",
            next_step="run the same loop on each rank",
        )

"""Tells the owners of rows which of them the coming batches of all ranks look up.

It is done before a checkpoint is due, in a thread of its own and over a group of its own. What it
tells is a hint, so no rank waits for it: if it fails, or comes too late, rows are copied in the
stall.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.home.channel import Channel
from recpoint.lookahead.owned_rows import OwnedRows, packed_ids, unpacked_ids

__all__ = ["ComingBatches", "RowExchange", "RowsUnknown"]

_log = logging.getLogger("recpoint")


class RowsUnknown(Exception):
    """The rows of coming batches are not known; its text says why, for `CopiedRows.why_plain`."""


class ComingBatches(NamedTuple):
    """The batches of one rank until a checkpoint is due.

    Attributes:
        due_step: batches done when the checkpoint is due.
        batches_done: batches done now.
        ids: ids of the next batches, as far as they were read: name of a table -> ids in the whole
            table, int32 or int64 [n], on the CPU.
    """

    due_step: int
    batches_done: int
    ids: Sequence[Mapping[str, Tensor]]


class RowExchange:
    """The exchanges of one rank. It belongs to one thread.

    Args:
        channel: to the other ranks, for this object alone.
        owned: for each rank, the rows that it stores.
    """

    def __init__(self, channel: Channel, owned: Sequence[Sequence[OwnedRows]]) -> None:
        self._channel = channel
        self._owned = tuple(owned)
        self._told_step: int | None = None  # the checkpoint of which all ranks have told
        self._failure: str | None = None

    def tell(self, coming: ComingBatches) -> list[dict[str, Tensor]]:
        """Tell the owners what this rank's batches look up, and return what all ranks' look up.

        Every rank calls it for a checkpoint, in turn, until all have read all batches until then.
        Once that is so, further calls for this checkpoint exchange nothing.

        Args:
            coming: the batches of this rank.

        Returns:
            For each batch until the checkpoint: `OwnedRows.key` -> ids of rows that this rank
            stores, as positions in them: int32 or int64 [n].

        Raises:
            RowsUnknown: a rank has not read all batches, the ranks have other checkpoints in mind,
                this checkpoint was told of before, or a rank did not answer. After the last reason
                nothing is exchanged any more.
        """
        if self._failure is not None:
            raise RowsUnknown(self._failure)
        if coming.due_step == self._told_step:
            raise RowsUnknown("the ranks had told each other of their batches before")
        try:
            return self._exchanged(coming)
        except RowsUnknown:
            raise
        except Exception as error:
            # Of this exchange something may be under way that must not meet the next one.
            self._channel.close()
            self._failure = "ranks no longer tell each other of coming batches; see the log"
            _log.warning(
                "rank %d tells and hears no more of coming batches, so checkpoints are copied in "
                "their stalls: %s",
                self._channel.rank,
                error,
            )
            raise RowsUnknown(self._failure) from error

    def _exchanged(self, coming: ComingBatches) -> list[dict[str, Tensor]]:
        own_header = torch.tensor([*coming[:2], len(coming.ids)], dtype=torch.int64, device="cpu")
        headers = [message.tolist() for message in self._to_all([own_header] * self._channel.count)]
        for rank, (due_step, batches_done, batches_read) in enumerate(headers):
            if due_step != coming.due_step:
                raise RowsUnknown(f"rank {rank} expected the checkpoint at batch {due_step}")
            if batches_read < due_step - batches_done:
                raise RowsUnknown(
                    f"rank {rank} had read {batches_read} of {due_step - batches_done} batches"
                )
        self._told_step = coming.due_step
        parts = [packed_ids(coming.ids, owned) for owned in self._owned]
        sizes = self._to_all([torch.tensor([part.numel()], device="cpu") for part in parts])
        messages = self._channel.swap(parts, [int(size) for size in sizes])
        own_rows = self._owned[self._channel.rank]
        batches_of_ranks = [
            unpacked_ids(message, own_rows, due_step - batches_done)
            for message, (due_step, batches_done, _) in zip(messages, headers, strict=True)
        ]
        # Counted from the checkpoint backwards: ranks may have been a batch apart.
        length = coming.due_step - coming.batches_done
        return [
            {
                rows.key: torch.cat(
                    [
                        batches[-distance][rows.key]
                        for batches in batches_of_ranks
                        if distance <= len(batches)
                    ]
                )
                for rows in own_rows
            }
            for distance in range(length, 0, -1)
        ]

    def _to_all(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank equally many int64, and return what the ranks have sent here."""
        parts = [values.view(torch.uint8) for values in numbers]
        # Cloned, because numbers must lie at addresses that fit their size.
        return [
            message.clone().view(torch.int64)
            for message in self._channel.swap(parts, [part.numel() for part in parts])
        ]

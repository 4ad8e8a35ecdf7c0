"""Carries bytes between all ranks of a training, for one thread of each rank."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from recpoint.errors import RankLost

__all__ = ["Channel", "GlooChannel"]

_log = logging.getLogger("recpoint")

#: After so many seconds a rank says that it waits for others.
_TOLD_SECONDS: Final = 60.0

#: The last byte of each message; a place that nothing has come to has a zero.
_END: Final = 1


class Channel(ABC):
    """Carries the bytes of one purpose, which never mix with others.

    Every method but `close` is collective: all ranks call the same methods in the same order. It
    belongs to one thread of each rank. Tensors are on the CPU.

    Attributes:
        rank: rank of this trainer.
        count: number of ranks.

    Raises:
        RankLost: a rank does not answer.
    """

    rank: int
    count: int

    @abstractmethod
    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a part to each rank, and return the parts that the ranks have sent here.

        Args:
            parts: uint8 [n] for each rank, in rank order.
            sizes: bytes that each rank sends here.

        Returns:
            uint8 [sizes[rank]] for each rank.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks: calls of theirs that wait for this rank fail at once."""

    def gather(self, own_part: Tensor) -> list[Tensor]:
        """Send bytes to all ranks, and return those of each rank, in rank order.

        Args:
            own: uint8 [n]; n may differ between ranks.
        """
        size = torch.tensor([own_part.numel()], dtype=torch.int64, device="cpu")
        size_messages = self.swap([size.view(torch.uint8)] * self.count, [size.nbytes] * self.count)
        sizes = [int(size_message.clone().view(torch.int64)) for size_message in size_messages]
        none = own_part[:0]
        parts = [none if rank == self.rank else own_part for rank in range(self.count)]
        sizes[self.rank] = 0
        by_rank = self.swap(parts, sizes)
        by_rank[self.rank] = own_part
        return by_rank


class GlooChannel(Channel):
    """A gloo group of its own, in the process group of this process. Collective.

    Args:
        name: what it carries, for errors.
        wait_seconds: the longest time that a rank may be behind the others; None: as torch sets it.

    Raises:
        RankLost: a rank does not answer.
    """

    def __init__(self, name: str, *, wait_seconds: float | None = None) -> None:
        self._name = name
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group: Any = None
        try:
            timeout = None if wait_seconds is None else timedelta(seconds=wait_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Channel`."""
        # One byte more for each rank: without any, ranks would not wait for each other. It is also
        # the end of a message: gloo says nothing of one that is shorter than its place.
        extended = [size + 1 for size in sizes]
        received = torch.zeros(sum(extended), dtype=torch.uint8, device="cpu")
        sent = [torch.cat([part, part.new_full((1,), _END)]) for part in parts]
        try:
            work = dist.all_to_all_single(
                received,
                torch.cat(sent),
                extended,
                [part.numel() for part in sent],
                group=self._open_group(),
                async_op=True,
            )
            self._wait(work)
        except RuntimeError as error:
            raise self._lost(error) from error
        by_rank = received.split(extended)
        short = [rank for rank, part in enumerate(by_rank) if part[-1] != _END]
        if short:
            raise self._lost(f"messages of ranks {short} are shorter than this rank has planned")
        return [part[:-1] for part in by_rank]

    def _wait(self, work: Any) -> None:
        """Wait for the other ranks, and say at doubling distances that this rank does."""
        seconds = _TOLD_SECONDS
        while True:
            try:
                work.wait(timeout=timedelta(seconds=seconds))
                return
            except RuntimeError:
                if work.is_completed():  # it has failed
                    raise
            _log.warning(
                "rank %d of %d has waited %g s for %s from the other ranks. Next: see the other "
                "ranks' logs. A rank that leaves out a backward pass of DistributedDataParallel "
                "has the others wait in that pass",
                self.rank,
                self.count,
                seconds,
                self._name,
            )
            seconds *= 2

    def close(self) -> None:
        """See `Channel`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # it went with an earlier default group
                dist.destroy_process_group(group)

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has left the others")
        return self._group

    def _lost(self, error: object) -> RankLost:
        return RankLost(
            f"rank {self.rank} of {self.count}",
            found=f"no {self._name} from the other ranks: {error}",
            expected="that all ranks train the same number of batches together",
            next_step="see the other ranks' logs",
        )

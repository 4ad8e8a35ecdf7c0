"""Lets the home threads of all trainers meet.

A row that one trainer has written back may enter another trainer's cache. The home threads
therefore meet between the write-backs and the fetches of a batch.
"""

from __future__ import annotations

from typing import Final, Protocol

from recpoint.embeddings.cache.turns import Act, Turns
from recpoint.embeddings.home.channel import Channel

__all__ = ["NO_BATCH", "Meeting", "MeetingOfOne", "MeetingOfRanks"]

#: Of what is done at any batch.
NO_BATCH: Final = 1


class Meeting(Protocol):
    """What the home thread of a trainer does together with those of the others."""

    @property
    def is_first(self) -> bool:
        """Whether this trainer does what one trainer does for all."""

    def meet(self, act: Act, batch: int = NO_BATCH) -> None:
        """Wait until the home threads of all trainers do the same; see `Turns.agree`. Collective.

        Raises:
            RanksDiffer: the trainers do different things.
            RankLost: a trainer does not answer.
        """

    def leave(self) -> None:
        """Leave the other home threads, which then wait for this one no longer."""


class MeetingOfOne:
    """The meeting of a trainer that shares its rows with no other: nothing to wait for."""

    is_first = True

    def meet(self, act: Act, batch: int = NO_BATCH) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


class MeetingOfRanks:
    """The meeting of the trainers on several ranks.

    Args:
        channel: for the home threads alone.
    """

    def __init__(self, channel: Channel) -> None:
        self.take(channel)

    def take(self, channel: Channel) -> None:
        """Meet through another channel from now on."""
        self._channel = channel
        self._turns = Turns(channel)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._channel.rank == 0

    def meet(self, act: Act, batch: int = NO_BATCH) -> None:
        """Wait until the home threads of all ranks do the same; see `Meeting.meet`."""
        self._turns.agree(act, batch)

    def leave(self) -> None:
        """Close the channel."""
        self._channel.close()

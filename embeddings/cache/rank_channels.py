"""Opens the channels to the other ranks, one for each thread that talks to them.

Each thread has a channel of its own, so that no message reaches another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recpoint.embeddings.cache.meeting import MeetingOfRanks
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.same_tables import capacities_of_ranks, refuse_differing
from recpoint.embeddings.cache.step_agreement import numbers_of_step
from recpoint.embeddings.cache.turns import Turns
from recpoint.embeddings.home.channel import Channel

__all__ = ["RankChannels"]


class RankChannels:
    """The channels of one rank. It is built on all ranks together.

    Args:
        open_channel: opens a channel to all ranks from its name. Collective.
        tables: name -> slots and first values, the same on all ranks; only numbers of slots may
            differ.

    Attributes:
        rank, count: this rank, and how many there are.
        rows: of the training thread.
        turns: says what the training thread does before it exchanges bytes.
        later: of the thread that makes later steps.
        later_turns: the same for that thread.
        ids: of the thread that tells ids of coming batches.
        meeting: of the home thread.
        capacities: name of a table -> its number of slots on each rank.

    Raises:
        SettingsError: the tables differ between ranks.
        RankLost: a rank does not answer.
    """

    def __init__(
        self, open_channel: Callable[[str], Channel], tables: Mapping[str, CachedRows]
    ) -> None:
        self._open_channel = open_channel
        self._numbers = numbers_of_step(len(tables))  # that ranks say before they exchange rows
        home_channel = self._open()
        self.meeting = MeetingOfRanks(home_channel)
        self.rank, self.count = self.rows.rank, self.rows.count
        try:
            refuse_differing(self.rows, tables)
            self.capacities = capacities_of_ranks(self.rows, tables)
        except BaseException:
            for channel in (self.ids, self.rows, self.later, home_channel):
                channel.close()
            raise

    def reopen(self) -> None:
        """Open new channels in place of closed ones. Collective."""
        self.meeting.take(self._open())

    def _open(self) -> Channel:
        """Open all channels; return that of the home thread."""
        self.rows = self._open_channel("rows")
        self.later = self._open_channel("gradients for later steps")
        home_channel = self._open_channel("sign of a home thread")
        self.ids = self._open_channel("ids of coming batches")
        self.turns = Turns(self.rows, self._numbers)
        self.later_turns = Turns(self.later, self._numbers)
        return home_channel

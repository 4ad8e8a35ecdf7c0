"""Works together with the other ranks that share the rows of a cache, and leaves them on errors.

All ranks act alike: batches, steps and checkpoints come in the same order on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from recpoint.embeddings.cache.batch_ids import ComingIds
from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.progress import Progress
from recpoint.embeddings.cache.rank_channels import RankChannels
from recpoint.embeddings.cache.turns import Act
from recpoint.errors import HomeError, RankLost, RanksDiffer

__all__ = ["Membership"]

_END_SECONDS: Final = 10.0


class Membership:
    """What one rank does together with the others, until it leaves them.

    Args:
        channels: to the other ranks.
        mover: the home thread of this rank.
        progress: at which batch this rank is.

    Attributes:
        channels: as given.
        coming: the ids of coming batches of all ranks.
        later_thread: makes later steps.
        over_batch: the last batch whose training is over on this rank.
        has_left: this rank exchanges nothing any more.
    """

    def __init__(self, channels: RankChannels, mover: Mover, progress: Progress) -> None:
        self.channels = channels
        self._mover = mover
        self._progress = progress
        self.later_thread = CallThread("recpoint-later-steps")
        self.coming = self._new_coming()
        self.over_batch = progress.batch
        self.has_left = False

    def _new_coming(self) -> ComingIds:
        row_counts = {name: rows.slots.rows for name, rows in self._mover.tables.items()}
        return ComingIds(self.channels.ids, row_counts, last=self._progress.batch)

    def agree(self, act: Act, numbers: Tensor | None = None) -> Tensor:
        """Wait until all ranks do the same after the same batch; see `Turns.agree`. Collective."""
        return self.channels.turns.agree(act, self._progress.batch, numbers)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave the other ranks if home or ranks fail in the block, so that none waits for this.

        Ranks lose each other after one of them has lost the home. Then this rank may know of that,
        and says what came first.
        """
        try:
            yield
        except (HomeError, RankLost, RanksDiffer) as error:
            self.leave()
            if isinstance(error, RankLost) and isinstance(self._mover.error, HomeError):
                raise self._mover.error from None
            raise

    def leave(self) -> None:
        """Leave the other ranks: close each channel by the thread that has it."""
        if not self.has_left:
            self.has_left = True
            self.channels.rows.close()
            self.coming.leave()
            self.later_thread.submit(self.channels.later.close)
            # After what it was given: the home threads of ranks that know of no loss may wait for
            # more than that.
            self._mover.thread.submit(self._mover.meeting.leave)

    def join_again(self) -> None:
        """Open new channels after this rank has left, as all others have. Collective."""
        self._mover.wait_for_all()  # until the home thread has left, too
        self.coming.end(within_seconds=0.0)
        self.channels.reopen()
        self.coming = self._new_coming()
        self.has_left = False

    @property
    def end_seconds(self) -> float:
        """How long to wait for the end of a thread, which may wait for a rank that waits for it."""
        return 0.0 if self.has_left else _END_SECONDS

    def end(self) -> None:
        """End all threads but the home thread, and close the channels."""
        self.coming.end(within_seconds=self.end_seconds)
        if self.later_thread.end(within_seconds=self.end_seconds):
            self.channels.later.close()
        if self._mover.thread.end(within_seconds=0.0):
            self._mover.meeting.leave()
        self.channels.rows.close()

"""Records checkpoints that an agent has rejected, for people (format §7)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound, RecpointError
from recpoint.format.record_kinds import REJECTIONS
from recpoint.format.rejections import MAX_REJECTIONS, Rejection, Rejections

__all__ = [
    "RejectionWatch",
    "leave_rejection",
]


_LOG = logging.getLogger("recpoint.persist")

#: How many ranks' records are read: the last written ones.
_MOST_RANKS = 100


def leave_rejection(run: Run, rank: int, rejection: Rejection) -> None:
    """Add a rejection to the record of its rank; errors of the store are logged, not raised.

    A rank has one agent at a time. If two write at once, one rejection is lost, but only people
    read them.

    Args:
        run: the run for which the checkpoint was meant.
        rank: the rank of the rejected job.
        rejection: what was rejected, and why.
    """
    try:
        try:
            before = run.records(REJECTIONS).read(rank)
        except (FormatError, ObjectNotFound):
            newest: tuple[Rejection, ...] = ()
            count = 0
        else:
            newest, count = before.newest, before.count
        if rejection in newest:
            return  # an agent was killed after this write, and now handles the job again
        record = Rejections(
            run=run.id,
            rank=rank,
            count=min(count + 1, 10**9),
            newest=(rejection, *newest)[:MAX_REJECTIONS],
            host=socket.gethostname()[:255],
            pid=os.getpid(),
        )
        run.records(REJECTIONS).put(record, rank)
    except RecpointError as error:
        # Nothing depends on it: the trainer has its answer, and the agent's log says the same.
        _LOG.info("a rejection was not recorded in the store: %s", error)


class RejectionWatch:
    """Reads a run's rejections repeatedly, but each version of a record only once.

    Args:
        run: the run.

    Attributes:
        damaged: the errors of records that cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[ObjectInfo, Rejections | FormatError] = {}
        self.damaged: tuple[FormatError, ...] = ()

    def refresh(self) -> list[Rejections]:
        """Return the rejections of each rank as stored now.

        Raises:
            StoreError: the store cannot be read.
        """
        records = self._run.records(REJECTIONS)
        infos = [info for _, info in records.listed()]
        now: dict[ObjectInfo, Rejections | FormatError] = {}
        for info in _written_last(infos):
            known = self._seen.get(info)
            try:
                now[info] = records.read_key(info.key) if known is None else known
            except FormatError as error:
                now[info] = error
            except ObjectNotFound:
                continue
        self._seen = now
        self.damaged = tuple(one for one in now.values() if isinstance(one, FormatError))
        return [one for one in now.values() if isinstance(one, Rejections)]


def _written_last(infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(infos, key=lambda info: (-info.modified_ms, info.key))[:_MOST_RANKS]

"""Checkpoints that an agent has rejected, left in the store for people (format §7)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.checked_read import read_checked
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import ForeignObject, FormatError, ObjectNotFound, RecpointError
from recpoint.format.naming import REJECTIONS_PREFIX, parse_rejections_key, rejections_key
from recpoint.format.records import pack_record, unpack_record
from recpoint.format.rejections import (
    MAX_REJECTIONS,
    MAX_REJECTIONS_BYTES,
    Rejection,
    Rejections,
)

__all__ = ["RejectionWatch", "leave_rejection"]

_LOG = logging.getLogger("recpoint.persist")

#: So many ranks' records are looked at, those that were written last.
_MOST_RANKS = 100


def leave_rejection(run: Run, rank: int, rejection: Rejection) -> None:
    """Add a rejection to those of its rank; a store that refuses is logged, not raised.

    A rank has one agent at a time. Where two write at once one rejection is lost, to people only.

    Args:
        run: the run that the checkpoint was meant for.
        rank: whose job it was.
        rejection: what was rejected, and why.
    """
    try:
        try:
            before = _read(run, rejections_key(rank))
        except (FormatError, ObjectNotFound):
            newest: tuple[Rejection, ...] = ()
            count = 0
        else:
            newest, count = before.newest, before.count
        if rejection in newest:
            return  # an agent was killed after this, and answers the job again
        record = Rejections(
            run=run.id,
            rank=rank,
            count=min(count + 1, 10**9),
            newest=(rejection, *newest)[:MAX_REJECTIONS],
            host=socket.gethostname()[:255],
            pid=os.getpid(),
        )
        run.store.put(rejections_key(rank), pack_record(record))
    except RecpointError as error:
        # Nothing depends on it: the trainer has its answer, and the agent's log says the same.
        _LOG.info("a rejection is not left in the store: %s", error)


class RejectionWatch:
    """Reads a run's rejections again and again, each record once.

    Args:
        run: the run.

    Attributes:
        damaged: why some records cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[ObjectInfo, Rejections | FormatError] = {}
        self.damaged: tuple[FormatError, ...] = ()

    def look(self) -> list[Rejections]:
        """What is there now, of each rank.

        Raises:
            StoreError: the store cannot be read.
        """
        infos = [
            info
            for info in self._run.store.list(REJECTIONS_PREFIX)
            if parse_rejections_key(info.key) is not None
        ]
        now: dict[ObjectInfo, Rejections | FormatError] = {}
        for info in _written_last(infos):
            known = self._seen.get(info)
            try:
                now[info] = _read(self._run, info.key) if known is None else known
            except FormatError as error:
                now[info] = error
            except ObjectNotFound:
                continue
        self._seen = now
        self.damaged = tuple(one for one in now.values() if isinstance(one, FormatError))
        return [one for one in now.values() if isinstance(one, Rejections)]


def _written_last(infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(infos, key=lambda info: (-info.modified_ms, info.key))[:_MOST_RANKS]


def _read(run: Run, key: str) -> Rejections:
    next_step = "nothing: the next checkpoint that is rejected writes it anew"

    def parse(data: bytes) -> Rejections:
        record = unpack_record(Rejections, data, name=key, next_step=next_step)
        if record.run != run.id or record.rank != parse_rejections_key(key):
            raise ForeignObject(
                key,
                found=f"rejections of rank {record.rank} of run {record.run}",
                expected=f"rank {parse_rejections_key(key)} of run {run.id}",
                next_step=next_step,
            )
        return record

    return read_checked(run.store, key, max_bytes=MAX_REJECTIONS_BYTES, parse=parse)

"""Checks the marks: rows that nothing has marked must be the same as at the cut before.

Some writes to a weight or row state escape torch's count of changes: writes through numpy, or by
another process into shared memory. Nothing marks such rows. Therefore each cut draws some rows of
each table at random and keeps their digests. At the next cut, the rows among them that are not
marked must have the same digests. If one does not, the whole table is dirty from that cut on.

The check runs before a cut takes the marks, in the same stall. Only cuts take marks, so at each
later check the marks name at least the rows that changed since the digests were kept; a window that
opened before the cut holds some of them aside. A checkpoint that fails or is rejected only adds
marks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.staging.sample import spread_rows
from recpoint.embeddings.tables.marks import Tracker
from recpoint.kernels import row_digest
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = ["UnmarkedRows"]


_log = logging.getLogger("recpoint")

_MOST_NAMED = 10

#: How many rows of a full that was copied ahead are compared, over all tables: 2 to 6 ms of 2 GB.
_COMPARED_COPIES = 4_096


class _Kept(NamedTuple):
    """Rows of one table as they were at a cut.

    Attributes:
        form: form of the table's arrays at the cut.
        ids: int64 [n], ascending: positions in the rows that this process holds.
        digests: for each array, int64 [n].
    """

    form: tuple[object, ...]
    ids: Tensor
    digests: tuple[Tensor, ...]


class UnmarkedRows:
    """Compares rows of each table from one cut to the next.

    Args:
        count: number of rows drawn from each table, or all rows of a smaller table; 0: nothing is
            compared.

    Attributes:
        found: number of rows that had changed although nothing had marked them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept_digests: dict[str, _Kept] = {}
        self.found = 0

    def forget(self) -> None:
        """Forget the rows that were kept: a restore has replaced them."""
        self._kept_digests.clear()

    def check(self, tables: Sequence[LiveTable], trackers: Mapping[str, Tracker]) -> None:
        """Compare the rows that were kept, and keep other rows for the next cut.

        Waits for the devices of tables on a GPU.

        Args:
            tables: the tables as they are now.
            trackers: trackers by `LiveTable.key`; if a table has changed, all its rows become
                dirty.
        """
        if not self._count:
            return
        for live in tables:
            if live.table is None or live.table.cached:  # a cache has no writes but its own
                continue
            tracker, earlier = trackers[live.key], self._kept_digests.get(live.key)
            tracker.notice_changes(
                live.row_states
            )  # changes that torch has counted make the table dirty without this check
            if earlier is not None and earlier.form == _form(live) and not tracker.all_rows:
                self._compare(live, tracker, earlier)
            # From the system, so that no random generator of the training advances.
            seed = int.from_bytes(os.urandom(8))
            ids = spread_rows(len(live.held), self._count, seed)
            self._kept_digests[live.key] = _Kept(_form(live), ids, _digests(live, ids))

    def differ(self, copies: Iterable[tuple[LiveTable, Sequence[Tensor]]]) -> bool:
        """Whether rows differ from their copies, which a window has made of a full; logs them.

        Rows are drawn at random. All rows that were marked have been copied again before.

        Args:
            copies: each table with copies of its values and row states, [rows, …] each.
        """
        pairs = list(copies)
        count = max(self._count, _COMPARED_COPIES // max(1, len(pairs)), 1)
        has_changes = False
        for live, copied in pairs:
            ids = spread_rows(len(live.held), count, int.from_bytes(os.urandom(8)))
            now = (live.weight.detach(), *live.row_states)
            differ = [
                (_bytes_of(array, ids) != _bytes_of(copy, ids)).any(1)
                for array, copy in zip(now, copied, strict=True)
            ]
            rows = ids[torch.stack(differ).any(0)] + live.held.start
            if rows.numel():
                has_changes = True
                self._report(
                    live,
                    rows,
                    differ,
                    compared=ids.numel(),
                    since="they were copied for this full",
                    remedy="This full is copied once more, in its stall",
                )
        return has_changes

    def _compare(self, live: LiveTable, tracker: Tracker, kept_digests: _Kept) -> None:
        unmarked = ~tracker.is_marked(kept_digests.ids)
        ids = kept_digests.ids[unmarked]
        if not ids.numel():
            return
        differ = [
            now != digest_before[unmarked]
            for now, digest_before in zip(_digests(live, ids), kept_digests.digests, strict=True)
        ]
        rows = ids[torch.stack(differ).any(0)] + live.held.start
        if not rows.numel():
            return
        tracker.all_rows = True
        self._report(
            live,
            rows,
            differ,
            compared=ids.numel(),
            since="the checkpoint before",
            remedy="This checkpoint stores the whole table",
        )

    def _report(
        self,
        live: LiveTable,
        rows: Tensor,
        differ: Sequence[Tensor],
        *,
        compared: int,
        since: str,
        remedy: str,
    ) -> None:
        """Count and log rows that have changed without a mark.

        Args:
            live: their table.
            rows: int64 [n]: positions in the whole table.
            differ: for values and each row state, bool [compared]: whether a compared row differs.
            compared: number of rows compared.
            since: since when they have changed.
            remedy: what becomes of the checkpoint.
        """
        self.found += rows.numel()
        names = ["values", *(f"row state {state.name!r}" for state in live.spec.row_states)]
        _log.warning(
            "table %r: %d of %d rows that nothing had marked have changed since %s (%s; rows %s). "
            "%s; earlier checkpoints may lack changes of rows that were not compared. Next: call "
            "mark() or mark_all() after each write to the table that torch does not count, such as "
            "through numpy or by another process",
            live.key,
            rows.numel(),
            compared,
            since,
            ", ".join(
                name for name, difference in zip(names, differ, strict=True) if difference.any()
            ),
            ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
            + (", and others" if rows.numel() > _MOST_NAMED else ""),
            remedy,
        )


def _form(live: LiveTable) -> tuple[object, ...]:
    arrays = (live.weight, *live.row_states)
    return live.held, live.spec, *[(array.dtype, array.shape) for array in arrays]


def _bytes_of(array: Tensor, ids: Tensor) -> Tensor:
    """Return the bytes of the rows at `ids`, on the host: uint8 [n, bytes of a row]."""
    with torch.no_grad():
        rows = array.index_select(0, ids.to(array.device)).cpu()
        return rows.view(ids.numel(), -1).view(torch.uint8)


def _digests(live: LiveTable, ids: Tensor) -> tuple[Tensor, ...]:
    """Return the digests of the rows at `ids`: int64 [n] for each array."""
    with torch.no_grad():
        rows = (
            array.detach().index_select(0, ids.to(array.device)).cpu()
            for array in (live.weight, *live.row_states)
        )
        return tuple(row_digest.digest_each(array, ids) for array in rows)

"""A check of the marks: rows that nothing has marked are as they were at the cut before.

What is written to a weight or a row state past torch's count of changes (through numpy, or by
another process into shared memory) is marked by nothing. So of each table some rows are drawn at
random at each cut, and their digests are kept. At the next cut those of them that are not marked
have to have the same digests. Where one has not, the table is dirty as a whole from that cut on.

The check is made before a cut takes the marks, in the same stall. Marks are only ever taken then,
so that at each later check they name at least the rows that were changed since the digests were
kept: a checkpoint that fails, or that is rejected, only adds to them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.marks import Tracker
from recpoint.kernels import row_digest
from recpoint.trainer_plugin.snapshot.copy import spread_rows
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = ["UnmarkedRows"]


_log = logging.getLogger("recpoint")

_MOST_NAMED = 10


class _Kept(NamedTuple):
    """Rows of one table as they were at a cut.

    Attributes:
        form: of the table's arrays then.
        ids: int64 [n], ascending: positions in what this process holds.
        digests: int64 [n] of each array.
    """

    form: tuple[object, ...]
    ids: Tensor
    digests: tuple[Tensor, ...]


class UnmarkedRows:
    """Compares rows of each table from one cut to the next.

    Args:
        count: rows drawn from each table, or all of a smaller one; 0: nothing is compared.

    Attributes:
        found: rows that had changed, and that nothing had marked.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[str, _Kept] = {}
        self.found = 0

    def check(self, tables: Sequence[LiveTable], trackers: Mapping[str, Tracker]) -> None:
        """Compare what was kept, and keep other rows for the next time.

        Tables on a device are waited for.

        Args:
            tables: as they are now.
            trackers: by `LiveTable.key`; one whose table is found changed is dirty as a whole.
        """
        if not self._count:
            return
        for live in tables:
            if live.table is None:
                continue
            tracker, kept = trackers[live.key], self._kept.get(live.key)
            tracker.notice_changes(
                live.row_states
            )  # what torch has counted is noticed without this
            if kept is not None and kept.form == _form(live) and not tracker.all_rows:
                self._compare(live, tracker, kept)
            # From the system, so that no generator of the training moves.
            seed = int.from_bytes(os.urandom(8))
            ids = spread_rows(len(live.held), self._count, seed)
            self._kept[live.key] = _Kept(_form(live), ids, _digests(live, ids))

    def _compare(self, live: LiveTable, tracker: Tracker, kept: _Kept) -> None:
        left = ~_marked(tracker.bitmap, kept.ids)
        ids = kept.ids[left]
        if not ids.numel():
            return
        differ = [
            now != before[left]
            for now, before in zip(_digests(live, ids), kept.digests, strict=True)
        ]
        rows = ids[torch.stack(differ).any(0)] + live.held.start
        if not rows.numel():
            return
        self.found += rows.numel()
        tracker.all_rows = True
        names = ["values", *(f"row state {state.name!r}" for state in live.spec.row_states)]
        _log.warning(
            "table %r: %d of %d rows that nothing had marked have changed since the checkpoint "
            "before (%s; rows %s): all of it is stored in this one. Earlier ones may lack changes "
            "of rows that were not compared. Next: call mark() or mark_all() after whatever writes "
            "to it past torch's count of changes, such as numpy or another process",
            live.key,
            rows.numel(),
            ids.numel(),
            ", ".join(name for name, one in zip(names, differ, strict=True) if one.any()),
            ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
            + (", and others" if rows.numel() > _MOST_NAMED else ""),
        )


def _form(live: LiveTable) -> tuple[object, ...]:
    arrays = (live.weight, *live.row_states)
    return live.held, live.spec, *[(one.dtype, one.shape) for one in arrays]


def _digests(live: LiveTable, ids: Tensor) -> tuple[Tensor, ...]:
    """int64 [n] of each array, of the rows at `ids`."""
    with torch.no_grad():
        rows = (
            array.detach().index_select(0, ids.to(array.device)).cpu()
            for array in (live.weight, *live.row_states)
        )
        return tuple(row_digest.digest_each(some, ids) for some in rows)


def _marked(bitmap: Tensor, ids: Tensor) -> Tensor:
    """bool [n] on the CPU: whether these rows are marked in a bitmap (`kernels.dirty_bitmap`)."""
    words = bitmap.index_select(0, (ids // 32).to(bitmap.device)).cpu().long()
    return ((words >> (ids % 32)) & 1).bool()

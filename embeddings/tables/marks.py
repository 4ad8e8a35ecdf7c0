"""Marks the rows of a table that have changed since the last checkpoint, one bit for each row.

A row is marked at the cheapest point that misses no change:

- A sparse gradient names the rows that a step of SGD, Adagrad or SparseAdam changes. Such tables
  are marked after each step of their optimizer, from the gradient that the step applied. Lookups
  then cost nothing, and rows that other processes looked up (DDP sums the gradients) are marked
  too.
- The rows of all other tables are marked at each lookup if gradients are on. Lookups of a module
  with max_norm are always marked, because they rewrite the rows they read. A dense gradient may
  have further rows that are not zero: from a norm of the weight, from a product with it, or from
  other processes. These rows are marked after the step. This takes passes over the gradient, as
  computing and applying the gradient did.

Every row that may have changed is marked. torch counts each in-place change in the weight's
version; if neither steps nor lookups explain the count, the whole table becomes dirty. torch does
not count writes into `weight.data` or through numpy: the user must mark those rows, and
`trainer_plugin.snapshot.unmarked_rows` looks for changed rows that nobody marked.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from recpoint.embeddings.tables.counted_lookups import LookupCounts
from recpoint.embeddings.tables.lookups import changes_of
from recpoint.embeddings.tables.marked_lookups import FAILED_LOOKUP, MarkedLookups
from recpoint.embeddings.tables.row_state_versions import UNCOUNTED, RowStateVersions
from recpoint.embeddings.tables.tables import Marker, Table
from recpoint.kernels import dirty_bitmap

__all__ = ["Dirty", "LookupMarker", "Tracker"]

_log = logging.getLogger("recpoint")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dirty:
    """The rows of one table that one snapshot must hold.

    Attributes:
        bitmap: one bit for each row, as `kernels.dirty_bitmap` lays them out; set: dirty.
        all_rows: every row is dirty, whatever the bitmap says.
        rows: number of rows of the table when this was taken.
    """

    bitmap: Tensor
    all_rows: bool
    rows: int


class Tracker:
    """Tracks the dirty rows of one table.

    Two bitmaps take turns: `take` hands over the marked bitmap and continues on the other, in
    constant time. The bitmap comes back by `merge_back` (its checkpoint will never exist) or by
    `release` (its rows are stored). If rows are copied before the cut, `set_aside` and `end_window`
    do the same in two steps. All methods are called from the training thread.

    Attributes:
        all_rows: every row is dirty.
        by_gradient: rows are marked after steps, from the gradient; otherwise at lookups.
        unapplied: rows were marked at a lookup and no optimizer step has followed yet.
        surprise: why `all_rows` was set although nothing announced the change, for the log.
        bitmap: the bitmap that takes marks now.
        aside: marks from before an open window; None: no window is open.
        version: version of the weight up to which its changes are explained.
        changes: changes of the weight in steps since the row states were last looked at.
        is_marked_after_steps: lookups need no mark in a compiled graph, because a step of the
            optimizer marks all rows that it changes.
        set_bits: marks ids in `bitmap`.
        quick: what `optimizers.after_steps` needs for a table on the CPU that is marked by
            gradient: the weight, the address of the bitmap and the number of rows. None for other
            tables.
        counts: counts the lookups of rows that are trained; None: nobody needs the counts.
    """

    # Slots keep the object compact: between two steps its memory has left the CPU's caches.
    __slots__ = (
        "aside",
        "_installed",
        "_known",
        "_lookups",
        "_spare",
        "_states",
        "_storage",
        "all_rows",
        "bitmap",
        "by_gradient",
        "changes",
        "counts",
        "is_marked_after_steps",
        "quick",
        "rows",
        "set_bits",
        "surprise",
        "table",
        "unapplied",
        "version",
        "weight",
    )

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = table.rows
        self.weight = table.weight
        self.all_rows = False
        self.by_gradient = False
        self.unapplied = False
        self.surprise: str | None = None
        self.counts: LookupCounts | None = None
        self.version = 0
        self._lookups = MarkedLookups(table)
        self._know_weight()
        self.quick: tuple[Tensor, int, int] | None = None
        self.aside: Dirty | None = None
        self._spare: list[Tensor] = [dirty_bitmap.new(self.rows, device=table.weight.device)]
        self._use(dirty_bitmap.new(self.rows, device=table.weight.device))
        self._installed = False
        self.changes = 0
        self._states = RowStateVersions()
        # Set by `choose`: recpoint knows what a step of its optimizer changes.
        self._known = self.is_marked_after_steps = False

    def _use(self, bitmap: Tensor) -> None:
        mark, quick = dirty_bitmap.marker(bitmap, rows=self.rows), self._quick(bitmap)
        # Assigned together, after both calls succeeded: an address must never outlive its bitmap.
        self.quick, self.set_bits, self.bitmap = quick, mark, bitmap

    def _quick(self, bitmap: Tensor) -> tuple[Tensor, int, int] | None:
        """Build the `quick` attribute for this bitmap."""
        if self.by_gradient and bitmap.is_cpu and self.counts is None:
            return self.weight, bitmap.data_ptr(), self.rows
        return None

    @property
    def bitmap_bytes(self) -> int:
        """Size of one bitmap, in bytes."""
        return self.bitmap.nbytes

    def install(self) -> None:
        """Hook into the module if rows are marked at lookups; `remove` undoes it."""
        self._installed = True
        self._lookups.install(self, marks=not self.by_gradient)

    def remove(self) -> None:
        """Take the hooks out of the module."""
        self._installed = False
        self._lookups.remove()

    def choose(self, *, by_gradient: bool, whole: bool = False) -> None:
        """Choose between marking after steps and marking at lookups.

        Args:
            by_gradient: the table's optimizer is watched, and if the gradient is sparse, a step
                changes only the rows of the gradient.
            whole: each step of the optimizer makes the whole table dirty.
        """
        self._known = by_gradient and self.table.counts_changes
        self.is_marked_after_steps = self._known or whole
        marks_by_gradient = (
            by_gradient
            and self.table.sparse
            and not self.table.changed_by_lookup
            and not self.weight.is_inference()  # its version is not counted
        )
        if marks_by_gradient == self.by_gradient:
            self._lookups.follow_rewrites()
            return
        self.by_gradient = marks_by_gradient
        self.quick = self._quick(self.bitmap)
        if self._installed:
            self.remove()
            self.install()
            # Neither way of marking knows rows that were looked up before this and change after it.
            self.all_rows = True
            self.unapplied = not marks_by_gradient

    def looked_up(self, ids: Tensor) -> None:
        """Mark rows that are about to be changed; see `tables.Marker`."""
        self.set_bits(ids)
        self.unapplied = True

    def applied(self) -> None:
        """Note that the rows looked up so far have been changed; see `tables.Marker`."""
        self.unapplied = False

    def check_version(self) -> None:
        """Make the table dirty if anything but marked lookups changed it since the last step."""
        if self._lookups.forget_unfinished():
            self.unexplained(FAILED_LOOKUP)
        if self._count() > self._lookups.take_rewrites():
            self.unexplained("its weight was changed outside the steps of its optimizer")

    def _count(self) -> int:
        """Return how often the weight was changed in place since the last call."""
        version = self._version()
        count, self.version = version - self.version, version
        return count

    def after_step(self) -> Tensor | None:
        """Mark the rows that a step of the table's optimizer has changed.

        Returns:
            Ids on a GPU that the caller must mark (`optimizers.mark_together`): the rows of the
            gradient, possibly with negative ids, which mark nothing. None if nothing is left to
            mark; rows of a gradient on the CPU are marked already.
        """
        weight = self.weight
        # The gradient still exists: torch's optimizers leave its removal to zero_grad().
        gradient = weight.grad
        # Lookups in a compiled graph were not seen, and neither were those of tables by gradient.
        if self.counts is not None and gradient is not None and not self.unapplied:
            self.counts.add_gradient(gradient)
        if self.by_gradient:
            version = weight._version
            count, self.version = version - self.version, version
            self.changes += count
            # A step changes the weight once, and not at all without a gradient.
            if count > 1 or (count and gradient is None):
                self.unexplained(
                    "its weight was changed more often than steps with a gradient explain"
                )
        else:
            self._after_lookups(gradient is not None)
        if gradient is None or self.all_rows:
            return None
        if gradient.is_sparse:
            # The public indices() needs a coalesced gradient, but duplicates do no harm here. If
            # columns are sparse too, their numbers are marked as if they were rows, which marks
            # more rows than have changed, never fewer.
            ids = gradient._indices()
        elif self.by_gradient or self.table.sparse:
            self.unexplained("it got a dense gradient although its module has sparse=True")
            return None
        elif gradient.is_cpu:
            dirty_bitmap.mark_nonzero(self.bitmap, gradient, rows=self.rows)
            return None
        else:
            ids = _rows_not_zero(gradient)
        if not ids.is_cpu:
            return ids
        self.set_bits(ids)
        return None

    def _after_lookups(self, has_gradient: bool) -> None:
        count = self._count()
        # A known optimizer changes the weight once if there is a gradient, and leaves the gradient
        # in place. Lookups of a module with max_norm made the other changes; lookups do not change
        # row states.
        self.changes += min(count, int(has_gradient))
        looked_up, self.unapplied = self.unapplied, False
        rewritten = self._lookups.take_rewrites()
        if count and not (has_gradient or looked_up):
            self.unexplained("a step changed its weight, but its gradient was gone after the step")
        elif count > int(has_gradient) + rewritten and self._known:
            # Known optimizers change a weight once: a hook or the closure made the other changes.
            self.unexplained("something beside its optimizer changed its weight during a step")

    def step_failed(self, *, whole: bool) -> None:
        """Note that a step of the optimizer ended with an error: what it changed is unknown.

        Args:
            whole: such a step also changes rows that were not looked up.
        """
        if whole or not self.unapplied:
            self.unexplained("a step of its optimizer ended with an error")

    def give_up(self, error: BaseException) -> None:
        """Make all rows dirty because the rows that a step changed could not be marked."""
        self.unexplained(f"the rows that a step changed could not be marked ({error})")

    def unexplained(self, why: str) -> None:
        """Make all rows dirty because of a change that no step and no lookup explains.

        Args:
            why: what happened, for the log.
        """
        self.all_rows = True
        self.surprise = self.surprise or why

    def notice_changes(self, row_states: Sequence[Tensor]) -> None:
        """Check now, as `take` does, whether anything was changed outside the steps."""
        self.check_version()
        self.follow_row_states(row_states)

    def mark(self, ids: Tensor) -> None:
        """Mark rows that were changed, or whose row states were, without a lookup or a step.

        Call it after the change.

        Args:
            ids: int32 or int64, any shape, on any device: positions in the weight.

        Raises:
            IndexError: an id is out of range; nothing is marked.
            ValueError: ids are not int32 or int64.
        """
        self.set_bits(ids.to(self.bitmap.device))
        self._announced()

    def mark_all(self) -> None:
        """Mark all rows as changed, after they were changed without a lookup or a step."""
        self.all_rows = True
        self._announced()

    def _announced(self) -> None:
        """Note that every change until now is marked."""
        self.version = self._version()
        self._lookups.take_rewrites()
        self._states.know_changes()
        self.changes = 0

    def take(self) -> Dirty:
        """Return the dirty rows; only rows whose update is still to come stay dirty here."""
        self.check_version()
        dirty = Dirty(bitmap=self.bitmap, all_rows=self.all_rows, rows=self.rows)
        # Every dirty row stays dirty here until nothing below can fail any more.
        spare = self._spare.pop() if self._spare else torch.zeros_like(dirty.bitmap)
        if self.unapplied:
            # Rows looked up before the cut and changed after it belong to both checkpoints.
            dirty_bitmap.merge(spare, dirty.bitmap)
        self._use(spare)
        self.all_rows = self.unapplied and dirty.all_rows
        return dirty

    def marked(self) -> Dirty:
        """Return the dirty rows and keep them dirty; later marks appear in the returned bitmap."""
        self.check_version()
        return Dirty(bitmap=self.bitmap, all_rows=self.all_rows, rows=self.rows)

    def is_marked(self, ids: Tensor) -> Tensor:
        """Return whether each row is marked, here or in the bitmap that was set aside.

        Args:
            ids: int64 [n], on the CPU: positions in the weight.

        Returns:
            bool [n], on the CPU.
        """
        is_marked = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
        for bitmap in (self.bitmap, *(() if self.aside is None else (self.aside.bitmap,))):
            words = bitmap.index_select(0, (ids // 32).to(bitmap.device)).cpu().long()
            is_marked |= ((words >> (ids % 32)) & 1).bool()
        return is_marked

    def set_aside(self) -> Dirty:
        """Go on with a clean bitmap before a cut, and return the marks until now.

        `end_window` or `merge_back` must follow. Call it only if neither `all_rows` nor `unapplied`
        is set: the change of a row that is looked up and not applied yet would have no mark.
        """
        spare = self._spare.pop() if self._spare else torch.zeros_like(self.bitmap)
        aside = Dirty(bitmap=self.bitmap, all_rows=False, rows=self.rows)
        self._use(spare)
        self.aside = aside
        return aside

    def end_window(self, aside: Dirty, *, keep: bool) -> Dirty:
        """Return the dirty rows as `take` does, or with `keep` as `marked` does.

        Args:
            aside: as `set_aside` returned it, with all later marks added; none is left here.
            keep: the rows stay dirty.
        """
        self.aside = None
        if keep:
            clean = self.bitmap
            self._use(aside.bitmap)
            self._spare.append(clean)
        elif self.unapplied:
            dirty_bitmap.merge(self.bitmap, aside.bitmap)  # as in `take`
        return aside

    def merge_back(self, dirty: Dirty) -> None:
        """Make the rows that `take` returned dirty again. Never raises: training must go on."""
        if dirty is self.aside:
            self.aside = None
        if not self._fits(dirty):
            self.all_rows = True
            return
        try:
            dirty_bitmap.merge(self.bitmap, dirty.bitmap)
        except Exception as error:
            # Triton compiles the GPU's kernel at its first use, which fails on a full disk, for
            # instance. It is safe to mark all rows, as in before_lookup.
            self.unexplained(f"rows could not be marked again ({error})")
        self.all_rows = self.all_rows or dirty.all_rows
        self.release(dirty)

    def release(self, dirty: Dirty) -> None:
        """Take back the bitmap that `take` returned, whose rows are stored. Never raises."""
        if not self._fits(dirty):
            return
        try:
            dirty_bitmap.clear(dirty.bitmap)
        except Exception as error:  # as in merge_back; the next `take` allocates a new bitmap
            _log.warning(
                "table %r: a bitmap could not be cleared (%s); the next checkpoint allocates a new "
                "one",
                self.table.key,
                error,
            )
            return
        self._spare.append(dirty.bitmap)

    def _fits(self, dirty: Dirty) -> bool:
        """Whether the weight has the device and the number of rows it had at that `take`."""
        return dirty.rows == self.rows and dirty.bitmap.device == self.bitmap.device

    def forget(self, changed: Tensor | None = None) -> None:
        """Make all rows clean, except those that are set in `changed`, a bitmap on any device."""
        dirty_bitmap.clear(self.bitmap)
        if changed is not None:
            dirty_bitmap.merge(self.bitmap, changed.to(self.bitmap.device))
        self.all_rows = self.unapplied = False
        self.surprise = None
        self._lookups.forget_unfinished()
        self._know_weight()

    def _know_weight(self) -> None:
        """Take every change of the weight until now as explained."""
        self.version = self._version()
        self._lookups.take_rewrites()
        # A weak reference, so that freed memory stays free. The address alone is not enough,
        # because freed memory is used again.
        self._storage = weakref.ref(self.weight.untyped_storage()), self.weight.data_ptr()

    def _lies_elsewhere(self) -> bool:
        storage, address = self._storage
        return storage() is not self.weight.untyped_storage() or self.weight.data_ptr() != address

    def follow_weight(self) -> None:
        """Notice that the module has another weight, or that the weight moved or was resized."""
        if self.table.weight is not self.weight or self._lies_elsewhere():
            self.weight = self.table.weight
            self._know_weight()
            self.quick = self._quick(self.bitmap)
            self.unexplained("its weight was replaced")
        if self.weight.device != self.bitmap.device or self.table.rows != self.rows:
            self._fit_bitmaps(self.weight.device)
            self.unexplained("its weight moved to another device or has another number of rows")
        if self.weight.is_inference():
            self.unexplained(f"its weight was made {UNCOUNTED}")

    def follow_growth(self) -> None:
        """Follow a table that was given more rows: all its rows are dirty, and nobody is warned."""
        self.all_rows = True
        self._fit_bitmaps(self.bitmap.device)
        self._know_weight()
        self._states = RowStateVersions()
        if self.counts is not None:
            self.counts.follow_growth(self.rows)

    def _fit_bitmaps(self, device: torch.device) -> None:
        """Go on with a clean bitmap for the rows that the table has now."""
        self.rows = self.table.rows
        self._use(dirty_bitmap.new(self.rows, device=device))
        self._spare.clear()

    def follow_row_states(self, tensors: Sequence[Tensor]) -> None:
        """Notice that row states are other tensors, or were changed outside the steps."""
        # The table changes its own states as it likes, and reports the rows.
        own_states = {id(state) for state in self.table.own_states.values()}
        tensors = [tensor for tensor in tensors if id(tensor) not in own_states]
        # A table that is dirty as a whole needs no check, and could fail it: momentum, for
        # instance, changes its buffer twice for each change of the weight.
        if not self.all_rows:
            # A known optimizer's step changes row states as often as the weight, or not at all.
            most_changes = self.changes if self._known else None
            why = self._states.surprise(tensors, most_changes=most_changes)
            if why is not None:
                self.unexplained(why)
        self._states.know(tensors)
        self.changes = 0

    def _version(self) -> int:
        """Return how often the weight was changed in place; 0 if `counts_changes` is False."""
        return changes_of(self.weight) if self.table.counts_changes else 0

    def report_surprise(self) -> None:
        """Log, once, what made the whole table dirty unexpectedly."""
        if self.surprise is not None:
            _log.warning(
                "table %r: %s; the next checkpoint stores all its rows. Next: train through the "
                "module in training mode, or call mark() for rows that are changed otherwise",
                self.table.key,
                self.surprise,
            )
            self.surprise = None


class LookupMarker:
    """Marks the rows of all features of one module's lookups, with one call a lookup.

    Args:
        markers: for each feature, the marker of its table; those that are no trackers have no row.
    """

    __slots__ = ("_all_bags", "_bags", "_bitmaps", "_features", "_mark", "_tables", "_trackers")

    def __init__(self, markers: Sequence[Marker]) -> None:
        tracked = [(f, marker) for f, marker in enumerate(markers) if isinstance(marker, Tracker)]
        self._features = [feature for feature, _ in tracked]
        self._trackers = [tracker for _, tracker in tracked]
        self._tables = list(dict.fromkeys(self._trackers))
        self._bitmaps: list[Tensor] = []
        self._mark = dirty_bitmap.feature_marker([], rows=[])
        self._all_bags: Sequence[tuple[int, int]] | None = None
        self._bags: Sequence[tuple[int, int]] = ()

    def mark(self, ids: Tensor, offsets: Tensor, bags: Sequence[tuple[int, int]]) -> None:
        """Mark rows of one lookup, which are about to be changed with it.

        Nothing waits for a GPU, and one launch marks all features.

        Args:
            ids: int32 or int64 [n], all ids of the lookup.
            offsets: int32 or int64 [bags + 1]: where the ids of each bag begin.
            bags: for each feature, its first bag and the end of its bags. A list that is given
                again costs less; the caller must not change it.
        """
        if not self._trackers:
            return
        # A tracker takes another bitmap at each cut.
        bitmaps = [tracker.bitmap for tracker in self._trackers]
        if not self._bitmaps or not all(map(is_, bitmaps, self._bitmaps)):
            rows = [tracker.rows for tracker in self._trackers]
            self._mark = dirty_bitmap.feature_marker(bitmaps, rows=rows)
            self._bitmaps = bitmaps
        if bags is not self._all_bags:
            self._bags = [bags[feature] for feature in self._features]
            self._all_bags = bags
        self._mark(ids, offsets, self._bags)
        for tracker in self._tables:
            tracker.applied()


def _rows_not_zero(gradient: Tensor) -> Tensor:
    """Return the ids of a dense GPU gradient's rows that are not all zeros; -1 for other rows.

    Args:
        gradient: [rows, dim], dense, on a GPU.

    Returns:
        int64 [rows], on the gradient's device.
    """
    # A row's largest and smallest value are NaN if any value is NaN. This is faster than any().
    is_nonzero = (gradient.amax(1) != 0) | (gradient.amin(1) != 0)
    # The shape does not depend on the count, so nothing waits for the GPU. Id -1 marks nothing.
    rows = torch.arange(is_nonzero.numel(), device=gradient.device)
    return torch.where(is_nonzero, rows, -1)

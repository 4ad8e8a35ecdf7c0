"""Marks the rows of a table that have changed since the last checkpoint: one bit a row.

A row is marked where it is cheapest to know that nothing is missed:

- A sparse gradient names the rows that a step of SGD, Adagrad or SparseAdam changes. Such tables
  are marked after each step of their optimizer, from the gradient it applied: lookups cost nothing,
  and rows that other processes looked up (DDP sums their gradients) are marked too.
- All other tables are marked at the lookup, when gradients are on, or always for a module with
  max_norm, which rewrites the rows it reads. A dense gradient may hold more than those lookups: a
  norm of the weight, a product with it, rows of other processes. So its rows that are not zero are
  marked after the step too, which takes passes over it, as making and applying it did.

Marked is what could change, never less. Every in-place change counts up the weight's version: a
count that neither steps nor lookups explain makes the whole table dirty. What is written into
`weight.data`, or through numpy, is not counted: such rows are to be marked by hand, and
`trainer_plugin.snapshot.unmarked_rows` looks for those that were not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from recpoint.embeddings.lookups import (
    AfterLookupHook,
    LookupHook,
    RewritingLookup,
    changes_of,
    outside_graphs,
)
from recpoint.embeddings.tables import Table
from recpoint.interrupts import came_from_handler
from recpoint.kernels import dirty_bitmap

__all__ = ["Dirty", "Tracker"]

_log = logging.getLogger("recpoint")

_UNCOUNTED = "under torch.inference_mode(), of which torch counts no changes"

_gradients_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True, kw_only=True, eq=False)
class Dirty:
    """The rows of one table, of `rows` rows then, that one snapshot has to hold."""

    bitmap: Tensor
    all_rows: bool
    rows: int


class Tracker:
    """The dirty rows of one table.

    Two bitmaps take turns: `take` hands over the one that was marked and continues on the other,
    in constant time. What was taken comes back by `merge_back` (its checkpoint will never be) or
    by `release` (it is stored). All methods are called from the training thread.

    Attributes:
        all_rows: every row is dirty.
        by_gradient: rows are marked after steps, from the gradient; else at lookups.
        unapplied: rows were marked at a lookup and no optimizer step has followed yet.
        surprise: why `all_rows` was set although nothing announced it, for the log.
        bitmap: the one that is marked now.
        version: the weight's, as far as what changed it is known.
        changes: of the weight in steps, since the row states were looked at.
        rewrites: lookups since `version` that were marked and have changed the weight once each.
        quick: for `optimizers.after_steps`, of a table on the CPU that is marked by gradient:
            weight, what marks (`dirty_bitmap.compiled_mark`), address of the bitmap, rows.
    """

    # One compact object: between two steps its memory has left the caches.
    __slots__ = (
        "_after_compiled_lookup",
        "_after_hook",
        "_before_compiled_lookup",
        "_hook",
        "_installed",
        "_known",
        "_lookup",
        "_mark",
        "_spare",
        "_states",
        "_storage",
        "_whole",
        "all_rows",
        "bitmap",
        "by_gradient",
        "changes",
        "quick",
        "rewrites",
        "rows",
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
        self.version = self.rewrites = 0
        self._know_weight()
        self.quick: tuple[Tensor, Callable[..., int], int, int] | None = None
        self._spare: list[Tensor] = [dirty_bitmap.new(self.rows, device=table.weight.device)]
        self._use(dirty_bitmap.new(self.rows, device=table.weight.device))
        self._hook: RemovableHandle | None = None
        self._after_hook: RemovableHandle | None = None
        self._lookup: RewritingLookup | None = None
        self._installed = False
        self.changes = 0
        self._states: list[tuple[weakref.ref[Tensor], int]] = []
        # By `choose`: its optimizer is one of those that are known, or one that changes all rows.
        self._known = self._whole = False

    def _use(self, bitmap: Tensor) -> None:
        mark, quick = dirty_bitmap.marker(bitmap, rows=self.rows), self._quick(bitmap)
        # All at once, when all are there: an address must never outlive the bitmap it is of.
        self.quick, self._mark, self.bitmap = quick, mark, bitmap

    def _quick(self, bitmap: Tensor) -> tuple[Tensor, Callable[..., int], int, int] | None:
        """What `optimizers.after_steps` needs."""
        if self.by_gradient and bitmap.is_cpu:
            return self.weight, dirty_bitmap.compiled_mark(), bitmap.data_ptr(), self.rows
        return None

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of one bitmap."""
        return self.bitmap.nbytes

    def install(self) -> None:
        """Hook into the module, if lookups are to be marked; `remove` undoes it."""
        self._installed = True
        if not self.by_gradient and self._hook is None:
            self._before_compiled_lookup = outside_graphs(
                self.before_lookup, self.table.key, rewritten=self.table.changed_by_lookup
            )
            self._hook = self.table.before_lookup(LookupHook(self))
        self._follow_rewrites()

    def _follow_rewrites(self) -> None:
        """Hook in behind the lookups of a table whose lookups rewrite it, and of no other."""
        wanted = self._hook is not None and self.table.changed_by_lookup
        if wanted and self._after_hook is None:
            self._after_compiled_lookup = outside_graphs(
                self.after_lookup, self.table.key, rewritten=True
            )
            self._after_hook = self.table.after_lookup(AfterLookupHook(self))
        elif not wanted and self._after_hook is not None:
            self._after_hook.remove()
            self._after_hook = self._lookup = None
            del self._after_compiled_lookup  # as in remove()

    def remove(self) -> None:
        """Take the hooks out of the module."""
        self._installed = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            del self._before_compiled_lookup  # it keeps this, and with it the bitmaps
        self._follow_rewrites()

    def choose(self, *, by_gradient: bool, whole: bool = False) -> None:
        """Mark after steps, or at lookups.

        Args:
            by_gradient: the table's optimizer is watched, and with a sparse gradient changes the
                rows of the gradient only.
            whole: each of its steps makes the table dirty as a whole.
        """
        self._whole = whole
        self._known = by_gradient and self.table.counts_changes
        wanted = (
            by_gradient
            and self.table.sparse
            and not self.table.changed_by_lookup
            and not self.weight.is_inference()  # its version is not counted
        )
        if wanted == self.by_gradient:
            self._follow_rewrites()
            return
        self.by_gradient = wanted
        self.quick = self._quick(self.bitmap)
        if self._installed:
            self.remove()
            self.install()
            # Rows that were looked up before and are changed after this are known to neither way.
            self.all_rows = True
            self.unapplied = not wanted

    def before_lookup(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outside_graph: bool = False,
    ) -> None:
        """Mark the ids of a lookup that can change their rows. Runs at each lookup.

        Args:
            outside_graph: a graph was ended for this, though all is still said to be compiled.
        """
        trains = module.training and _gradients_enabled() and self.weight.requires_grad
        # A lookup of a module with max_norm rewrites the rows it reads, also in evaluation and
        # without gradients.
        rewritten = module.max_norm is not None
        if not (trains or rewritten):
            return
        if not outside_graph and _is_compiling():
            # This cuts the graph in two, which fullgraph=True refuses. What a known optimizer
            # changes is in the gradient, of which rows are marked after its step; after that of
            # one that changes all rows they all are.
            if rewritten or not (self._known or self._whole):
                self._before_compiled_lookup(module, args, kwargs, True)  # is here again
            return
        try:
            ids = args[0] if args else kwargs["input"]
            if rewritten:
                self._rewrites_rows_of(module, ids)
            self._mark(ids)
        except IndexError:
            return  # nothing was marked; the lookup itself fails, in its own words
        except Exception as error:
            # Whatever it is, it must not stop training, and not knowing the rows has a safe form.
            self._unexplained(f"a lookup could not be marked ({error})")
            if came_from_handler(error):
                raise
        self.unapplied = self.unapplied or trains

    def _rewrites_rows_of(self, module: Any, ids: Tensor) -> None:
        """A lookup begins that rewrites the rows of these ids; `after_lookup` is to follow."""
        self._check_lookup()
        if module.weight is not self.weight:
            return  # `functional_call` has put another one in its place
        self._lookup = RewritingLookup.begun(module, ids)

    def _check_lookup(self) -> None:
        """Whatever lookup rewrites rows has ended by now.

        One that failed may have rewritten some, and torch does not count the change then.
        """
        if self._lookup is not None:
            self._lookup = None
            self._unexplained("a lookup that rewrites its rows (max_norm) ended with an error")

    def after_lookup(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outside_graph: bool = False,
    ) -> None:
        """Explain the one change of the weight by a lookup that `before_lookup` has marked.

        Runs after each lookup of a table with max_norm that returned. What was changed beside that
        is not explained, nor is it where other ids were looked up.

        Args:
            outside_graph: see `before_lookup`.
        """
        if not outside_graph and _is_compiling():
            self._after_compiled_lookup(module, args, kwargs, True)  # is here again
            return
        lookup, self._lookup = self._lookup, None
        if lookup is None or module.max_norm is None:
            return
        if not lookup.plain:
            if changes_of(self.weight) != lookup.changes:
                self._unexplained(
                    "its module has max_norm and a forward of its own, which may rewrite any row"
                )
            return
        ids = args[0] if args else kwargs.get("input")  # a hook after ours may have replaced them
        if module.weight is self.weight and lookup.explains_change(ids, self.weight):
            self.rewrites += 1

    def looked_up(self, ids: Tensor) -> None:
        """Rows that are about to be changed; see `tables.Marker`."""
        self._mark(ids)
        self.unapplied = True

    def applied(self) -> None:
        """See `tables.Marker`."""
        self.unapplied = False

    def before_step(self) -> None:
        """A step begins of an optimizer that may count the version up by any number."""
        self._check_version()

    def _check_version(self) -> None:
        """Whatever changed the weight until now was no step of its optimizer."""
        self._check_lookup()
        if self._count() > self._rewritten():
            self._unexplained("its weight was changed outside the steps of its optimizer")

    def _count(self) -> int:
        """How often the weight was changed in place since this was last asked."""
        version = self._version()
        count, self.version = version - self.version, version
        return count

    def _rewritten(self) -> int:
        """How many of those changes were lookups that are marked."""
        rewrites, self.rewrites = self.rewrites, 0
        return rewrites

    def after_step(self) -> Tensor | None:
        """A step of the table's optimizer is over.

        Returns:
            The rows of the gradient, which the step changed and nothing has marked, beside ids
            that are no row's; what was on the CPU is marked already.
        """
        weight = self.weight
        # The gradient is still there: the optimizers of torch leave it to zero_grad().
        gradient = weight.grad
        if self.by_gradient:
            version = weight._version
            count, self.version = version - self.version, version
            self.changes += count
            # A step changes it once, and not at all without a gradient.
            if count > 1 or (count and gradient is None):
                self._unexplained("more than steps with a gradient has changed its weight")
        else:
            self._after_lookups(gradient is not None)
        if gradient is None or self.all_rows:
            return None
        if gradient.is_sparse:
            # Public for coalesced gradients only, but duplicates do no harm. If columns are sparse
            # too, their numbers are marked with the rows: more than has changed, never less.
            ids = gradient._indices()
        elif self.by_gradient or self.table.sparse:
            self._unexplained("a dense gradient arrived although the module is sparse")
            return None
        elif gradient.is_cpu:
            dirty_bitmap.mark_nonzero(self.bitmap, gradient, rows=self.rows)
            return None
        else:
            ids = _rows_not_zero(gradient)
        if not ids.is_cpu:
            return ids
        self._mark(ids)
        return None

    def _after_lookups(self, has_gradient: bool) -> None:
        count = self._count()
        # A known optimizer has changed it once, if it has a gradient, which it leaves there:
        # lookups of a module with max_norm the other times, and those change no row states.
        self.changes += min(count, int(has_gradient))
        looked_up, self.unapplied = self.unapplied, False
        rewritten = self._rewritten()
        if count and not (has_gradient or looked_up):
            self._unexplained("a step changed it, and its gradient was gone after the step")
        elif count > int(has_gradient) + rewritten and self._known:
            # In hooks of the step or in its closure: known optimizers change a weight once.
            self._unexplained("more than its optimizer has changed its weight during a step")

    def step_failed(self, *, whole: bool) -> None:
        """A step of its optimizer ended with an error: what it changed until then is unknown.

        Args:
            whole: such a step changes rows that were not looked up too.
        """
        if whole or not self.unapplied:
            self._unexplained("a step of its optimizer did not end")

    def give_up(self, error: BaseException) -> None:
        """The rows that a step changed could not be marked: all of them are dirty."""
        self._unexplained(f"the rows that a step changed could not be marked ({error})")

    def _unexplained(self, why: str) -> None:
        self.all_rows = True
        self.surprise = self.surprise or why

    def notice_changes(self, row_states: Sequence[Tensor]) -> None:
        """Notice what was changed outside the steps until now, as `take` does."""
        self._check_version()
        self.follow_row_states(row_states)

    def mark(self, ids: Tensor) -> None:
        """Mark rows that changed, or whose states did, without a lookup or a step; call it after.

        Raises:
            IndexError: an id is out of range; nothing is marked.
            ValueError: ids are not int32 or int64.
        """
        self._mark(ids.to(self.bitmap.device))
        self._announced()

    def mark_all(self) -> None:
        """All rows changed without a lookup."""
        self.all_rows = True
        self._announced()

    def _announced(self) -> None:
        """What has changed until now is marked."""
        self.version, self.rewrites = self._version(), 0
        self._know_row_states([tensor for ref, _ in self._states if (tensor := ref()) is not None])

    def take(self) -> Dirty:
        """Everything dirty now; from here on nothing is, but rows whose update is still to come."""
        self._check_version()
        taken = Dirty(bitmap=self.bitmap, all_rows=self.all_rows, rows=self.rows)
        # Until nothing can fail any more, everything stays dirty here.
        other = self._spare.pop() if self._spare else torch.zeros_like(taken.bitmap)
        if self.unapplied:
            # Looked up before the cut, changed after it: such rows belong to both checkpoints.
            dirty_bitmap.merge(other, taken.bitmap)
        self._use(other)
        self.all_rows = self.unapplied and taken.all_rows
        return taken

    def marked(self) -> Dirty:
        """Everything dirty now; it stays dirty, and its bitmap goes on being marked."""
        self._check_version()
        return Dirty(bitmap=self.bitmap, all_rows=self.all_rows, rows=self.rows)

    def merge_back(self, dirty: Dirty) -> None:
        """What `take` returned is dirty again; never raises, since training is told of a loss."""
        if not self._fits(dirty):
            self.all_rows = True
            return
        try:
            dirty_bitmap.merge(self.bitmap, dirty.bitmap)
        except Exception as error:
            # A GPU's kernel is compiled for this when it is first needed, which a full disk keeps
            # it from, for one: as in before_lookup.
            self._unexplained(f"rows could not be marked again ({error})")
        self.all_rows = self.all_rows or dirty.all_rows
        self.release(dirty)

    def release(self, dirty: Dirty) -> None:
        """What `take` returned is stored: its bitmap can be used again; never raises."""
        if not self._fits(dirty):
            return
        try:
            dirty_bitmap.clear(dirty.bitmap)
        except Exception as error:  # as in merge_back; the next `take` makes another
            _log.warning("table %r: a bitmap is let go: %s", self.table.key, error)
            return
        self._spare.append(dirty.bitmap)

    def _fits(self, dirty: Dirty) -> bool:
        """Whether the weight is still where, and as long as, it was when `take` returned this."""
        return dirty.rows == self.rows and dirty.bitmap.device == self.bitmap.device

    def forget(self, changed: Tensor | None = None) -> None:
        """Nothing is dirty, or what is marked in `changed`, a bitmap on any device."""
        dirty_bitmap.clear(self.bitmap)
        if changed is not None:
            dirty_bitmap.merge(self.bitmap, changed.to(self.bitmap.device))
        self.all_rows = self.unapplied = False
        self.surprise = self._lookup = None
        self._know_weight()

    def _know_weight(self) -> None:
        """Whatever has changed the weight until now is known."""
        self.version, self.rewrites = self._version(), 0
        # Weakly. Its address alone does not tell it: memory that is let go of is used again.
        self._storage = weakref.ref(self.weight.untyped_storage()), self.weight.data_ptr()

    def _lies_elsewhere(self) -> bool:
        storage, address = self._storage
        return storage() is not self.weight.untyped_storage() or self.weight.data_ptr() != address

    def follow_weight(self) -> None:
        """Notice that the module got another weight, or its weight another place or length."""
        if self.table.weight is not self.weight or self._lies_elsewhere():
            self.weight = self.table.weight
            self._know_weight()
            self.quick = self._quick(self.bitmap)
            self._unexplained("its weight was replaced")
        if self.weight.device != self.bitmap.device or self.table.rows != self.rows:
            self.rows = self.table.rows
            self._use(dirty_bitmap.new(self.rows, device=self.weight.device))
            self._spare.clear()
            self._unexplained("its weight has another device or another number of rows")
        if self.weight.is_inference():
            self._unexplained(f"its weight was made {_UNCOUNTED}")

    def follow_row_states(self, tensors: Sequence[Tensor]) -> None:
        """Notice that row states are other tensors, or were changed outside the steps.

        Those that come to be with the first step are new in the table's spec: nothing is known of
        them here.
        """
        # Of a table that is dirty as a whole there is nothing to find out: momentum, for one,
        # changes its buffer twice for each change of the weight.
        known = () if self.all_rows else self._states
        for (ref, version), tensor in zip(known, tensors, strict=False):
            if ref() is not tensor:
                self._unexplained("its optimizer has other row states")
            elif tensor.is_inference():
                self._unexplained(f"its row states were made {_UNCOUNTED}")
            # A step of a known optimizer changes them as often as the weight, or not at all.
            elif self._known and changes_of(tensor) - version > self.changes:
                self._unexplained("its row states were changed outside the steps of its optimizer")
        self._know_row_states(tensors)

    def _know_row_states(self, tensors: Sequence[Tensor]) -> None:
        # Weakly: what an optimizer let go of must not be kept.
        self._states = [(weakref.ref(tensor), changes_of(tensor)) for tensor in tensors]
        self.changes = 0

    def _version(self) -> int:
        """How often the weight was changed in place; where steps do not explain it, it is 0."""
        return changes_of(self.weight) if self.table.counts_changes else 0

    def report_surprise(self) -> None:
        """Log, once, what made the whole table dirty unexpectedly."""
        if self.surprise is not None:
            _log.warning(
                "table %r: %s; all of it is stored in the next checkpoint. Next: train through "
                "the module in training mode, or call mark() for rows changed otherwise",
                self.table.key,
                self.surprise,
            )
            self.surprise = None


def _rows_not_zero(gradient: Tensor) -> Tensor:
    """Rows of a dense gradient on a GPU that are not all zeros, with -1 in place of the others.

    By the largest and the smallest value, which are NaN where one is: faster than any().
    """
    found = (gradient.amax(1) != 0) | (gradient.amin(1) != 0)
    # How many they are, the device is not waited for to learn. An id below zero marks nothing.
    rows = torch.arange(found.numel(), device=gradient.device)
    return torch.where(found, rows, -1)

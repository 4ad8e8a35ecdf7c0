"""Which rows have changed since the last checkpoint: one bit a row, set at the training lookup.

Marked is what could change, never less: a lookup under gradients, a lookup of a module with
max_norm, everything once something happens that the lookups do not explain.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import Table

__all__ = ["Dirty", "Tracker"]

_log = logging.getLogger("recpoint")

_gradients_enabled = torch.is_grad_enabled
_mark = dirty_bitmap.mark


@dataclass(frozen=True, kw_only=True, eq=False)
class Dirty:
    """The rows of one table, of `rows` rows then, that one snapshot has to hold."""

    bitmap: Tensor
    all_rows: bool
    rows: int

    def count(self, rows: int) -> int:
        """How many they are, of a table of `rows` rows. Waits for the bitmap's device."""
        return rows if self.all_rows else dirty_bitmap.count(self.bitmap)


class Tracker:
    """The dirty rows of one table.

    Two bitmaps take turns: `take` hands over the one that was marked and continues on the other,
    in constant time. What was taken comes back by `merge_back` (its checkpoint will never be) or
    by `release` (it is stored). All methods are called from the training thread.

    Attributes:
        all_rows: every row is dirty.
        unapplied: rows were looked up and no optimizer step has followed yet.
        surprise: why `all_rows` was set although nothing announced it, for the log.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = table.rows
        self.weight = table.weight
        self.all_rows = False
        self.unapplied = False
        self.surprise: str | None = None
        self._bitmap = dirty_bitmap.new(self.rows, device=table.weight.device)
        self._spare: list[Tensor] = [dirty_bitmap.new(self.rows, device=table.weight.device)]
        self._hooks: list[RemovableHandle] = []

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of one bitmap."""
        return self._bitmap.nbytes

    def install(self) -> None:
        """Hook into the module; `remove` undoes it."""
        module = self.table.module
        self._hooks.append(module.register_forward_pre_hook(self._before_lookup, with_kwargs=True))
        if self.weight.requires_grad:
            self._hooks.append(self.weight.register_post_accumulate_grad_hook(self._after_gradient))

    def remove(self) -> None:
        """Take the hooks out of the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_lookup(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Runs for each lookup of each table. A lookup of a module with max_norm rewrites the rows
        # it reads, also in evaluation and without gradients.
        if module.max_norm is None and not (
            module.training and _gradients_enabled() and self.weight.requires_grad
        ):
            return
        try:
            _mark(self._bitmap, args[0] if args else kwargs["input"], rows=self.rows)
        except IndexError:
            return  # nothing was marked; the lookup itself fails, in its own words
        except Exception as error:
            # Whatever it is, it must not stop training, and not knowing the rows has a safe form.
            self._unexplained(f"a lookup could not be marked ({error})")
        self.unapplied = True

    def _after_gradient(self, weight: Tensor) -> None:
        # Gradients that no marked lookup explains: the module trains in evaluation mode, or the
        # weight is used directly. One comparison a table and step buys that nothing is missed.
        if not self.unapplied:
            self._unexplained("a gradient arrived without a lookup in training mode")
        elif self.table.module.sparse and weight.grad is not None and not weight.grad.is_sparse:
            self._unexplained("a dense gradient arrived although the module is sparse")

    def _unexplained(self, why: str) -> None:
        self.all_rows = True
        self.surprise = self.surprise or why

    def mark(self, ids: Tensor) -> None:
        """Mark rows that changed without a lookup.

        Raises:
            IndexError: an id is out of range; nothing is marked.
            ValueError: ids are not int32 or int64.
        """
        _mark(self._bitmap, ids.to(self._bitmap.device), rows=self.rows)

    def take(self) -> Dirty:
        """Everything dirty now; from here on nothing is, but rows whose update is still to come."""
        taken = Dirty(bitmap=self._bitmap, all_rows=self.all_rows, rows=self.rows)
        self._bitmap = self._spare.pop() if self._spare else torch.zeros_like(taken.bitmap)
        self.all_rows = False
        if self.unapplied:
            # Looked up before the cut, changed after it: such rows belong to both checkpoints.
            dirty_bitmap.merge(self._bitmap, taken.bitmap)
            self.all_rows = taken.all_rows
        return taken

    def merge_back(self, dirty: Dirty) -> None:
        """What `take` returned is dirty again."""
        if not self._fits(dirty):
            self.all_rows = True
            return
        dirty_bitmap.merge(self._bitmap, dirty.bitmap)
        self.all_rows = self.all_rows or dirty.all_rows
        self.release(dirty)

    def release(self, dirty: Dirty) -> None:
        """What `take` returned is stored: its bitmap can be used again."""
        if self._fits(dirty):
            dirty_bitmap.clear(dirty.bitmap)
            self._spare.append(dirty.bitmap)

    def _fits(self, dirty: Dirty) -> bool:
        """Whether the weight is still where, and as long as, it was when `take` returned this."""
        return dirty.rows == self.rows and dirty.bitmap.device == self._bitmap.device

    def forget(self) -> None:
        """Nothing is dirty: the table is exactly what a checkpoint holds."""
        dirty_bitmap.clear(self._bitmap)
        self.all_rows = self.unapplied = False
        self.surprise = None

    def follow_weight(self) -> None:
        """Notice that the module got another weight, or its weight another device or length."""
        if self.table.weight is not self.weight:
            self.remove()
            self.weight = self.table.weight
            self.install()
            self._unexplained("its weight was replaced")
        if self.weight.device != self._bitmap.device or self.table.rows != self.rows:
            self.rows = self.table.rows
            self._bitmap = dirty_bitmap.new(self.rows, device=self.weight.device)
            self._spare.clear()
            self._unexplained("its weight has another device or another number of rows")

    def report_surprise(self) -> None:
        """Log, once, what made the whole table dirty unexpectedly."""
        if self.surprise is not None:
            _log.warning(
                "table %r: %s; all of it is stored in the next checkpoint. Next: train through "
                "the module in training mode, or call mark() for rows changed otherwise",
                self.table.name,
                self.surprise,
            )
            self.surprise = None

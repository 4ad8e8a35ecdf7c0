"""Marks the rows that steps of optimizers change, or that they change all of a table."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from recpoint.embeddings.marks import Tracker
from recpoint.embeddings.optimizer_rows import (
    AllRows,
    FullyDirtyTables,
    Watched,
    all_rows_changed,
    always_changes_all_rows,
    changes_gradient_rows,
    counts_one_change,
)
from recpoint.interrupts import came_from_handler
from recpoint.kernels import dirty_bitmap

__all__ = ["OptimizerWatch", "OtherSteps", "after_steps", "mark_together"]

_log = logging.getLogger("recpoint")

_INT64 = torch.int64


class OtherSteps(Protocol):
    """Notices the steps of optimizers that are not watched; `trainer_plugin.unknown_optimizers`."""

    def install(self) -> None:
        """Notice them from now on; `remove` undoes it."""

    def remove(self) -> None:
        """Notice them no more."""

    def take_trained(self) -> set[int]:
        """ids of the parameters that such steps have trained since the last call."""

    def refuse(self) -> None:
        """Raise SettingsError where such an optimizer trains the model, and still exists."""


class _Group:
    """The tables of one parameter group, and what its hyperparameters do to them."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], row_local: tuple[type, ...]
    ) -> None:
        self.optimizer = optimizer
        self.group = group
        self.row_local = row_local
        self.trackers: list[Tracker] = []
        self.checked_before: list[Tracker] = []
        self.whole: list[Tracker] = []
        self.reasons: dict[str, AllRows] = {}
        self.watched = Watched(group)

    def evaluate(self) -> None:
        self.watched = Watched(self.group)
        self.whole, self.reasons = [], {}
        for tracker in self.trackers:
            reason = all_rows_changed(
                self.optimizer,
                self.group,
                sparse=tracker.table.sparse,
                dtype=tracker.weight.dtype,
                row_local=self.row_local,
            )
            if reason is not None:
                self.whole.append(tracker)
                self.reasons[tracker.table.key] = reason


class _Owner(NamedTuple):
    optimizer: int
    group: int


class OptimizerWatch:
    """Hooks into every optimizer's step.

    After a step, the rows of its gradients are marked, and every table of a group whose
    update changes all rows is dirty as a whole, as are all after `load_state_dict` of their
    optimizer, whose row states are others then. Hyperparameters are looked at after each step,
    since schedulers and users change them. A step that ends with an error is noticed at the next
    step or cut, whichever comes first.

    `unknown`: notices the steps of optimizers that are none of these.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        trackers: Mapping[str, Tracker],
        *,
        row_local: tuple[type, ...] = (),
        unknown: OtherSteps | None = None,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._unknown = unknown
        self._trackers = dict(trackers)
        self._row_local = row_local
        self._groups: list[list[_Group]] = [[] for _ in self._optimizers]
        self._owners: dict[str, _Owner] = {}
        self._stepping = [False] * len(self._optimizers)
        self._told: set[str] = set()
        self._hooks: dict[int, tuple[RemovableHandle, ...]] = {}
        self._installed = False
        self._regroup()

    def install(self) -> None:
        """Hook into the optimizers; `remove` undoes it."""
        self._installed = True
        self._regroup()  # a restored optimizer has other parameter groups
        if self._unknown is not None:
            self._unknown.install()

    def remove(self) -> None:
        """Take the hooks out of the optimizers."""
        self._installed = False
        self._hook_up()
        if self._unknown is not None:
            self._unknown.remove()

    def _hook_up(self) -> None:
        """Hooks in the optimizers that train a table, and in no other."""
        for number, optimizer in enumerate(self._optimizers):
            wanted = self._installed and bool(self._groups[number])
            if wanted and number not in self._hooks:
                post = optimizer.register_step_post_hook(self._hook(self._after_step, number))
                # First of all such hooks: others may reset the gradient that names the rows.
                hooks = optimizer._optimizer_step_post_hooks
                for other in [key for key in hooks if key != post.id]:
                    hooks[other] = hooks.pop(other)
                self._hooks[number] = (
                    optimizer.register_step_pre_hook(self._hook(self._before_step, number)),
                    post,
                    optimizer.register_load_state_dict_post_hook(
                        self._hook(self._after_load, number)
                    ),
                )
            elif not wanted:
                for hook in self._hooks.pop(number, ()):
                    hook.remove()

    def _hook(self, look: Callable[[int], None], number: int) -> Callable[..., None]:
        """`look` at that optimizer, as a hook of it: its errors would end training."""

        def hook(*_: Any) -> None:
            try:
                look(number)
            except BaseException as error:  # not knowing the rows has a safe form, whatever it is
                self._give_up(error)
                if not isinstance(error, Exception) or came_from_handler(error):
                    raise  # Ctrl-C, a watchdog's time-out

        return hook

    def owner(self, table: str) -> int | None:
        """Index of the optimizer that trains a table."""
        found = self._owners.get(table)
        return None if found is None else found.optimizer

    def follow_groups(self) -> None:
        """Notice what happened to optimizers outside their steps; call it before a cut.

        A table that came to another optimizer or group is dirty as a whole.

        Raises:
            SettingsError: an optimizer that is none of these trains the model, and still exists.
        """
        for number, stepping in enumerate(self._stepping):
            if stepping:
                self._step_failed(number)
        before = self._owners
        self._regroup()
        for name, tracker in self._trackers.items():
            if before.get(name) != self._owners.get(name):
                tracker.all_rows = True
        if self._unknown is not None:
            trained = self._unknown.take_trained()
            for tracker in self._trackers.values() if trained else ():
                if id(tracker.weight) in trained:
                    tracker.all_rows = True
            self._unknown.refuse()

    def warn(self) -> None:
        """One warning for all tables that every step changes as a whole, with the reasons."""
        reasons = self._reasons()
        if not reasons:
            return
        self._told.update(reasons)
        lines = "; ".join(
            f"table {name!r}, optimizer {self._class_name(name)}: {reason.why} "
            f"(change: {reason.change})"
            for name, reason in reasons.items()
        )
        warnings.warn(
            f"every checkpoint stores these tables as a whole: {lines}",
            FullyDirtyTables,
            stacklevel=3,  # the line that builds the Checkpointer
        )

    def _class_name(self, table: str) -> str:
        return type(self._optimizers[self._owners[table].optimizer]).__name__

    def _reasons(self) -> dict[str, AllRows]:
        return {
            name: reason
            for groups in self._groups
            for group in groups
            for name, reason in group.reasons.items()
            if self._trackers[name].weight.requires_grad
        }

    def _regroup(self) -> None:
        by_weight = {id(tracker.weight): tracker for tracker in self._trackers.values()}
        self._owners = {}
        for number, optimizer in enumerate(self._optimizers):
            self._groups[number] = []
            for position, parameters in enumerate(optimizer.param_groups):
                group = _Group(optimizer, parameters, self._row_local)
                for parameter in parameters["params"]:
                    tracker = by_weight.get(id(parameter))
                    if tracker is not None:
                        group.trackers.append(tracker)
                        self._owners[tracker.table.key] = _Owner(number, position)
                if group.trackers:
                    group.evaluate()
                    self._groups[number].append(group)
        for name, tracker in self._trackers.items():
            found = self._owners.get(name)
            if found is None:
                tracker.choose(by_gradient=False)
                continue
            its = self._optimizers[found.optimizer]
            tracker.choose(
                by_gradient=changes_gradient_rows(its),
                whole=always_changes_all_rows(its, self._row_local),
            )
        for number, optimizer in enumerate(self._optimizers):
            exact = counts_one_change(optimizer)
            for group in self._groups[number]:
                group.checked_before = [
                    tracker for tracker in group.trackers if not (exact and tracker.by_gradient)
                ]
        self._hook_up()

    def _before_step(self, number: int) -> None:
        if self._stepping[number]:
            self._step_failed(number)
        self._stepping[number] = True
        for group in self._groups[number]:
            for tracker in group.checked_before:
                tracker.before_step()

    def _after_step(self, number: int) -> None:
        found = []
        for group in self._groups[number]:
            if group.watched.differ(group.group):
                group.evaluate()
                self._tell(group)
            for tracker in group.whole:
                # Without a gradient, as that of a frozen table, an optimizer passes a table over.
                if tracker.weight.requires_grad or tracker.weight.grad is not None:
                    tracker.all_rows = True
            found += after_steps(group.trackers)
        if found:
            mark_together(found)
        self._stepping[number] = False  # last: a step that is interrupted until here has failed

    def _after_load(self, number: int) -> None:
        """It has other row states now, and other parameter groups than those looked at."""
        self._regroup()
        for group in self._groups[number]:
            for tracker in group.trackers:
                tracker.all_rows = True

    def _give_up(self, error: BaseException) -> None:
        """What a hook was to find out is not known. It must not stop training: that is safe."""
        for tracker in self._trackers.values():
            tracker.give_up(error)

    def _step_failed(self, number: int) -> None:
        self._stepping[number] = False
        for group in self._groups[number]:
            for tracker in group.trackers:
                tracker.step_failed(whole=tracker in group.whole)

    def _tell(self, group: _Group) -> None:
        for name, reason in group.reasons.items():
            if name not in self._told:
                self._told.add(name)
                _log.warning(
                    "table %r is stored as a whole from now on: %s. Next: %s",
                    name,
                    reason.why,
                    reason.change,
                )


def after_steps(trackers: Sequence[Tracker]) -> list[tuple[Tracker, Tensor]]:
    """`after_step` of several tables; for `mark_together`, what it returned that is to be marked.

    What a step of sparse gradients on the CPU does to a table is written out: this runs after work
    that has filled the caches with other things, and what counts is how little is touched.
    """
    found = []
    for tracker in trackers:
        try:
            if tracker.quick is not None:
                weight, mark, bitmap, rows = tracker.quick
                gradient, version = weight.grad, weight._version
                if gradient is not None and version - tracker.version == 1 and gradient.is_sparse:
                    ids = gradient._indices()
                    # A weight that went to another device, or a gradient of another form, is left
                    # to after_step(). So are ids out of range: nothing was marked then.
                    if ids.dtype is _INT64 and ids.is_cpu and ids.is_contiguous():
                        if mark(bitmap, ids.data_ptr(), ids.numel(), 1, rows) < 0:
                            tracker.version = version
                            tracker.changes += 1
                            continue
            left = tracker.after_step()
        except Exception as error:
            tracker.give_up(error)
            if came_from_handler(error):
                raise
            continue  # it must not stop training
        if left is not None:
            found.append((tracker, left))
    return found


def mark_together(found: Sequence[tuple[Tracker, Tensor]]) -> None:
    """Mark what `Tracker.after_step` returned for several tables: a launch for each GPU."""
    by_device: dict[torch.device, list[tuple[Tracker, Tensor]]] = {}
    for tracker, ids in found:
        by_device.setdefault(tracker.bitmap.device, []).append((tracker, ids))
    for marks in by_device.values():
        try:
            # The allocator keeps the memory of ids for the stream that the launch is in.
            dirty_bitmap.mark_many(
                [tracker.bitmap for tracker, _ in marks],
                [ids for _, ids in marks],
                rows=[tracker.rows for tracker, _ in marks],
            )
        except Exception as error:
            for tracker, _ in marks:
                tracker.give_up(error)
            if came_from_handler(error):
                raise

"""Tells which rows of a table an optimizer changes, and watches its steps to mark them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle

from recpoint.embeddings.marks import Tracker
from recpoint.format.dtypes import dtype_name
from recpoint.interrupts import came_from_handler
from recpoint.kernels import dirty_bitmap

__all__ = ["FullyDirtyTables", "OptimizerWatch", "after_steps", "all_rows_changed", "row_states"]


# Which rows of a table an optimizer changes, and which of its state belongs to rows.
#
# With dense gradients a row that was not looked up has a gradient of zeros. Whether its bytes stay
# as they are then depends on the update. They do when the update adds -lr * 0: x + (-0.0) is x for
# every x, also for -0.0. They do not when anything pulls on every row (weight decay), remembers
# earlier gradients (momentum, moments), or adds +0.0 (maximize), which turns -0.0 into +0.0.


_WATCHED = ("momentum", "weight_decay", "maximize", "eps")
_KNOWN = (SGD, Adagrad, SparseAdam)
#: TorchRec's, which is not imported for it: Adagrad with one sum a row, of dense gradients only.
_ROWWISE_ADAGRAD = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
_MAX_ENTRY_DIMS = 4
_MAX_STATES = 64
_MAX_ENTRY_SIZE = 2**20


class FullyDirtyTables(RuntimeWarning):
    """Tables whose optimizer changes every row at each step, so that increments are fulls."""


class AllRows(NamedTuple):
    """Why every row of a table changes at each step, and what to do about it."""

    why: str
    change: str


class Watched:
    """The hyperparameters that `all_rows_changed` looks at: when they change, ask it again."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        there = [name for name in _WATCHED if name in group]
        # One call into C for all of them: this is compared after each step.
        self._read = itemgetter(*there) if there else _nothing
        self._values = self._read(group)
        self._size = len(group)

    def differ(self, group: Mapping[str, Any]) -> bool:
        """Whether they are others now, or may be."""
        try:
            changed: bool = len(group) != self._size or self._read(group) != self._values
        except (KeyError, RuntimeError, ValueError):
            return True  # one is gone, or is an array, which is not compared as a whole
        return changed


def _nothing(_group: Mapping[str, Any]) -> None:
    return None


def all_rows_changed(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    sparse: bool,
    dtype: torch.dtype,
    row_local: tuple[type, ...] = (),
) -> AllRows | None:
    """Why a step changes rows that were not looked up; None if it changes no such row.

    Args:
        optimizer: the table's optimizer.
        group: its parameter group, with the hyperparameters as they are now.
        sparse: whether the table's gradients are sparse.
        dtype: the table's.
        row_local: classes of which the user says that they change no other row.
    """
    if isinstance(optimizer, row_local):
        return None
    if always_changes_all_rows(optimizer, row_local):
        return _unknown(type(optimizer))
    kind = type(optimizer)
    if kind is SparseAdam:
        return None  # its update is masked to the rows of the sparse gradient
    rowwise = _is_rowwise(kind)
    if _active(group.get("weight_decay", 0)):
        return AllRows("weight_decay pulls on every row", "set weight_decay=0 for its group")
    if kind is SGD and _active(group.get("momentum", 0)):
        # Also with sparse gradients: the sparse momentum buffer keeps every row it ever held.
        return AllRows(
            "momentum goes on moving rows that were looked up earlier",
            "set momentum=0 for its group",
        )
    if sparse:
        return None
    if group.get("maximize", False):
        return AllRows(
            "maximize=True with dense gradients adds +0.0 to every row, which changes -0.0",
            "minimize the negated loss, or use sparse=True",
        )
    # In a narrow dtype a small eps is zero: 0 / (sqrt(0) + 0) is NaN in rows never looked up.
    if (kind is Adagrad or rowwise) and not _is_positive(group["eps"], dtype):
        return AllRows(
            f"eps={group['eps']} is zero in {dtype}: rows without gradient become NaN",
            "use a larger eps",
        )
    return None


def always_changes_all_rows(optimizer: Optimizer, row_local: tuple[type, ...]) -> bool:
    """Whether each step changes rows that were not looked up, whatever the hyperparameters are."""
    kind = type(optimizer)
    return not (isinstance(optimizer, row_local) or kind in _KNOWN or _is_rowwise(kind))


def _is_rowwise(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _ROWWISE_ADAGRAD


def changes_gradient_rows(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes the rows of that gradient, and leaves it.

    Unless `all_rows_changed` gives a reason why it changes all.
    """
    return type(optimizer) in _KNOWN


def counts_one_change(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes a weight in place exactly once."""
    return type(optimizer) in (SGD, Adagrad)  # SparseAdam skips gradients without entries


def _unknown(kind: type) -> AllRows:
    if kind.__module__.startswith("torch.optim"):
        return AllRows(
            f"{kind.__name__} moves every row by its moments",
            "use SparseAdam with sparse=True, or Adagrad",
        )
    return AllRows(
        f"{kind.__name__} is not known to change only rows that were looked up",
        "if it does, name it in Options.row_local_optimizers",
    )


def _active(hyperparameter: Any) -> bool:
    # A tensor may change without being replaced, and reading it may wait for a GPU: assume it acts.
    return isinstance(hyperparameter, Tensor) or hyperparameter != 0


def _is_positive(eps: Any, dtype: torch.dtype) -> bool:
    """Whether it is once it is in `dtype`; each of them, where there is one for each column."""
    return bool(torch.as_tensor(eps, dtype=torch.float64, device="cpu").to(dtype).min().item() > 0)


def row_states(state: Mapping[Any, Any], rows: int) -> dict[str, Tensor]:
    """The parts of a parameter's optimizer state that have one entry for each row, by name.

    Everything else (step counts, sparse buffers, factored moments) belongs to the state tree.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if (
            isinstance(name, str)
            and 0 < len(name) <= 1024
            and isinstance(value, Tensor)
            and value.layout is torch.strided
            and 1 <= value.dim() <= 1 + _MAX_ENTRY_DIMS
            and value.shape[0] == rows
            and all(1 <= size <= _MAX_ENTRY_SIZE for size in value.shape[1:])
            and value.is_contiguous()
            and _storable(value.dtype)
            and len(found) < _MAX_STATES
        ):
            found[name] = value
    return found


def _storable(dtype: torch.dtype) -> bool:
    try:
        dtype_name(dtype)
    except ValueError:
        return False
    return True


# Marks the rows that steps of optimizers change, or that they change all of a table.


_log = logging.getLogger("recpoint")

_INT64 = torch.int64


class OtherSteps(Protocol):
    """Notices steps of unwatched optimizers: `trainer_plugin.state.unknown_optimizers`."""

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

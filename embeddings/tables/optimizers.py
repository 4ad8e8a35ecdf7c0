"""Knows which rows of a table an optimizer step changes, and marks them after each step.

Part 1: which rows of a table an optimizer changes, and which of its states have one entry a row.
With dense gradients, a row that was not looked up has a gradient of zeros. The update decides
whether the row's bytes stay the same. They stay if the update adds -lr * 0: x + (-0.0) is x for
every x, also for -0.0. They change if the update pulls on every row (weight decay), remembers
earlier gradients (momentum, moments), or adds +0.0 (maximize), which turns -0.0 into +0.0.
"""

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

from recpoint.embeddings.tables.lookups import refuse_capture
from recpoint.embeddings.tables.marks import Tracker
from recpoint.format.dtypes import dtype_name
from recpoint.interrupts import came_from_handler
from recpoint.kernels import dirty_bitmap

__all__ = [
    "FullyDirtyTables",
    "OptimizerWatch",
    "after_steps",
    "all_rows_changed",
    "is_positive",
    "is_rowwise_adagrad",
    "row_states",
]


_WATCHED = ("momentum", "weight_decay", "maximize", "eps")
_KNOWN = (SGD, Adagrad, SparseAdam)
#: TorchRec's Adagrad with one sum for each row; it takes dense gradients only. It is known by name
#: so that TorchRec need not be imported.
_ROWWISE_ADAGRAD = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
_MAX_ENTRY_DIMS = 4
_MAX_STATES = 64
_MAX_ENTRY_SIZE = 2**20


class FullyDirtyTables(RuntimeWarning):
    """Warns of tables whose optimizer changes every row in each step.

    Each checkpoint then stores every row of these tables: their increments are as large as a full
    checkpoint.
    """


class AllRows(NamedTuple):
    """Why every row of a table changes in each step, and what to do about it."""

    why: str
    change: str


class Watched:
    """Remembers the hyperparameters that `all_rows_changed` reads, to notice that they changed."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        watched_keys = [name for name in _WATCHED if name in group]
        # One call into C reads all of them, because this runs after each step.
        self._read = itemgetter(*watched_keys) if watched_keys else _nothing
        self._values = self._read(group)
        self._size = len(group)

    def differ(self, group: Mapping[str, Any]) -> bool:
        """Whether the hyperparameters differ now, or may differ."""
        try:
            changed: bool = len(group) != self._size or self._read(group) != self._values
        except (KeyError, RuntimeError, ValueError):
            return True  # one was removed, or is an array, whose comparison has no single result
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
    """Return why a step changes rows that were not looked up; None if it changes no such row.

    Args:
        optimizer: the table's optimizer.
        group: the table's parameter group, with the hyperparameters as they are now.
        sparse: whether the table's gradients are sparse.
        dtype: dtype of the table.
        row_local: optimizer classes that, as the user declares, change only rows looked up.
    """
    if isinstance(optimizer, row_local):
        return None
    if always_changes_all_rows(optimizer, row_local):
        return _unknown(type(optimizer))
    kind = type(optimizer)
    if kind is SparseAdam:
        return None  # its update is masked to the rows of the sparse gradient
    rowwise = is_rowwise_adagrad(kind)
    if _active(group.get("weight_decay", 0)):
        return AllRows("weight_decay pulls on every row", "set weight_decay=0 for its group")
    if kind is SGD and _active(group.get("momentum", 0)):
        # Sparse gradients do not help: the sparse momentum buffer keeps every row it ever held.
        return AllRows(
            "momentum keeps moving rows that were looked up in earlier steps",
            "set momentum=0 for its group",
        )
    if sparse:
        return None
    if group.get("maximize", False):
        return AllRows(
            "maximize=True with dense gradients adds +0.0 to every row, which changes -0.0",
            "minimize the negated loss, or use sparse=True",
        )
    # In a narrow dtype a small eps rounds to zero; a row never looked up becomes
    # 0 / (sqrt(0) + 0), which is NaN.
    if (kind is Adagrad or rowwise) and not is_positive(group["eps"], dtype):
        return AllRows(
            f"eps={group['eps']} rounds to zero in {dtype}, so rows without gradient become NaN",
            "use a larger eps",
        )
    return None


def always_changes_all_rows(optimizer: Optimizer, row_local: tuple[type, ...]) -> bool:
    """Whether each step changes rows that were not looked up, whatever the hyperparameters are."""
    kind = type(optimizer)
    return not (isinstance(optimizer, row_local) or kind in _KNOWN or is_rowwise_adagrad(kind))


def is_rowwise_adagrad(kind: type) -> bool:
    """Whether the class is TorchRec's Adagrad with one sum for each row."""
    return f"{kind.__module__}.{kind.__qualname__}" == _ROWWISE_ADAGRAD


def changes_gradient_rows(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes only its rows and keeps the gradient.

    Hyperparameters can still make the step change all rows; see `all_rows_changed`.
    """
    return type(optimizer) in _KNOWN


def counts_one_change(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes a weight in place exactly once."""
    return type(optimizer) in (SGD, Adagrad)  # SparseAdam skips gradients without entries


def _unknown(kind: type) -> AllRows:
    if kind.__module__.startswith("torch.optim"):
        return AllRows(
            f"{kind.__name__} moves every row, not only those with a gradient",
            "use SparseAdam with sparse=True, or Adagrad",
        )
    return AllRows(
        f"recpoint does not know that {kind.__name__} changes only rows that were looked up",
        "if it changes only those, name it in Options.row_local_optimizers",
    )


def _active(hyperparameter: Any) -> bool:
    # A tensor counts as not zero: it may change in place, and reading it may wait for a GPU.
    return isinstance(hyperparameter, Tensor) or hyperparameter != 0


def is_positive(eps: Any, dtype: torch.dtype) -> bool:
    """Whether eps is positive after conversion to `dtype`; if it is a tensor, every value of it."""
    return bool(torch.as_tensor(eps, dtype=torch.float64, device="cpu").to(dtype).min().item() > 0)


def row_states(state: Mapping[Any, Any], rows: int) -> dict[str, Tensor]:
    """Return the parts of a parameter's optimizer state with one entry for each row, by name.

    The other parts (step counts, sparse buffers, factored moments) are stored in the state tree.

    Args:
        state: the optimizer's state of one parameter.
        rows: number of rows of the parameter.

    Returns:
        name -> tensor [rows, ...], contiguous; at most 64 of them.
    """
    states: dict[str, Tensor] = {}
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
            and len(states) < _MAX_STATES
        ):
            states[name] = value
    return states


def _storable(dtype: torch.dtype) -> bool:
    try:
        dtype_name(dtype)
    except ValueError:
        return False
    return True


_log = logging.getLogger("recpoint")

_INT64 = torch.int64


class OtherSteps(Protocol):
    """Notices steps of optimizers that the Checkpointer was not given.

    `trainer_plugin.state.unknown_optimizers` implements it.
    """

    def install(self) -> None:
        """Start to notice such steps; `remove` undoes it."""

    def remove(self) -> None:
        """Stop noticing such steps."""

    def take_trained(self) -> set[int]:
        """Return `id()` of each parameter that such steps have trained since the last call."""

    def refuse(self) -> None:
        """Raise SettingsError if such an optimizer still exists and trains the model."""


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
    """Hooks into the steps of the optimizers that train tables, and has their tables marked.

    After a step, the rows of its gradients are marked. A table is dirty as a whole after a step
    whose update changes all rows, and after `load_state_dict` of its optimizer, which replaces row
    states. Hyperparameters are looked at after each step because schedulers and users change them.
    A step that ended with an error is noticed at the next step or cut, whichever comes first.

    Args:
        optimizers: the optimizers to watch.
        trackers: the tables' trackers, by `Table.key`.
        row_local: see `all_rows_changed`.
        unknown: notices the steps of optimizers that are not in `optimizers`.
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
        self._regroup()  # restoring an optimizer replaced its parameter groups
        if self._unknown is not None:
            self._unknown.install()

    def remove(self) -> None:
        """Take the hooks out of the optimizers."""
        self._installed = False
        self._hook_up()
        if self._unknown is not None:
            self._unknown.remove()

    def _hook_up(self) -> None:
        """Hook into the optimizers that train a table, and take the hooks out of all others."""
        for number, optimizer in enumerate(self._optimizers):
            is_wanted = self._installed and bool(self._groups[number])
            if is_wanted and number not in self._hooks:
                post = optimizer.register_step_post_hook(self._hook(self._after_step, number))
                # Ours must run first: other hooks may reset the gradient that names the rows.
                hooks = optimizer._optimizer_step_post_hooks
                for other_key in [key for key in hooks if key != post.id]:
                    hooks[other_key] = hooks.pop(other_key)
                self._hooks[number] = (
                    optimizer.register_step_pre_hook(self._hook(self._before_step, number)),
                    post,
                    optimizer.register_load_state_dict_post_hook(
                        self._hook(self._after_load, number)
                    ),
                )
            elif not is_wanted:
                for hook in self._hooks.pop(number, ()):
                    hook.remove()

    def _hook(self, look: Callable[[int], None], number: int) -> Callable[..., None]:
        """Wrap `look` as a hook of that optimizer: an error makes all tables dirty instead.

        The hook raises SettingsError if the step is captured in a CUDA graph.
        """

        def hook(*_: Any) -> None:
            refuse_capture(f"a step of the tables' {type(self._optimizers[number]).__name__}")
            try:
                look(number)
            except BaseException as error:  # it is always safe to mark all rows instead
                self._give_up(error)
                if not isinstance(error, Exception) or came_from_handler(error):
                    raise  # Ctrl-C or a watchdog's time-out, which must end training

        return hook

    def owner(self, table: str) -> int | None:
        """Return the index of the optimizer that trains a table; None if no optimizer does."""
        group = self._owners.get(table)
        return None if group is None else group.optimizer

    def follow_groups(self) -> None:
        """Notice what happened to optimizers outside their steps; call it before a cut.

        A table that moved to another optimizer or group becomes dirty as a whole.

        Raises:
            SettingsError: an optimizer that is not watched trains the model, and still exists.
        """
        for number, stepping in enumerate(self._stepping):
            if stepping:
                self._step_failed(number)
        owners_before = self._owners
        self._regroup()
        for name, tracker in self._trackers.items():
            if owners_before.get(name) != self._owners.get(name):
                tracker.all_rows = True
        if self._unknown is not None:
            trained = self._unknown.take_trained()
            for tracker in self._trackers.values() if trained else ():
                if id(tracker.weight) in trained:
                    tracker.all_rows = True
            self._unknown.refuse()

    def warn(self) -> None:
        """Warn once of all tables that every step changes as a whole, with the reasons."""
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
            owner = self._owners.get(name)
            if owner is None:
                tracker.choose(by_gradient=False)
                continue
            own_optimizer = self._optimizers[owner.optimizer]
            tracker.choose(
                by_gradient=changes_gradient_rows(own_optimizer),
                whole=always_changes_all_rows(own_optimizer, self._row_local),
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
                tracker.check_version()

    def _after_step(self, number: int) -> None:
        to_mark = []
        for group in self._groups[number]:
            if group.watched.differ(group.group):
                group.evaluate()
                self._tell(group)
            for tracker in group.whole:
                # An optimizer skips a table that has no gradient, such as a frozen table.
                if tracker.weight.requires_grad or tracker.weight.grad is not None:
                    tracker.all_rows = True
            to_mark += after_steps(group.trackers)
        if to_mark:
            mark_together(to_mark)
        self._stepping[number] = False  # last: a step interrupted before this line has failed

    def _after_load(self, number: int) -> None:
        """Make all tables of the optimizer dirty: it has other row states and groups now."""
        self._regroup()
        for group in self._groups[number]:
            for tracker in group.trackers:
                tracker.all_rows = True

    def _give_up(self, error: BaseException) -> None:
        """Make all tables dirty because a hook failed, so that training can go on safely."""
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
    """Call `after_step` of several tables; return the ids left to mark, for `mark_together`.

    For sparse gradients on the CPU, the work of `Tracker.after_step` is written out here, and all
    tables are marked by one native call. The training step has filled the CPU's caches with other
    data, so speed depends on touching little memory.
    """
    to_mark: list[tuple[Tracker, Tensor]] = []
    quick: list[tuple[Tracker, int, Tensor, Tensor]] = []
    tables: list[int] = []
    for tracker in trackers:
        try:
            if tracker.quick is not None:
                weight, bitmap, rows = tracker.quick
                gradient, version = weight.grad, weight._version
                if gradient is not None and version - tracker.version == 1 and gradient.is_sparse:
                    ids = gradient._indices()
                    # `after_step` handles a weight that moved to another device, and a gradient of
                    # another form.
                    if ids.dtype is _INT64 and ids.is_cpu and ids.is_contiguous():
                        tables += bitmap, ids.data_ptr(), ids.numel(), rows
                        # The bitmap lives as long as its address is in use here.
                        quick.append((tracker, version, ids, tracker.bitmap))
                        continue
            unmarked_ids = tracker.after_step()
        except Exception as error:
            tracker.give_up(error)
            if came_from_handler(error):
                raise
            continue  # an error must not stop training
        if unmarked_ids is not None:
            to_mark.append((tracker, unmarked_ids))
    if quick:
        _mark_quick(quick, tables, to_mark)
    return to_mark


def _mark_quick(
    quick: Sequence[tuple[Tracker, int, Tensor, Tensor]],
    tables: Sequence[int],
    found: list[tuple[Tracker, Tensor]],
) -> None:
    """Mark the ids that `after_steps` gathered: tables as `dirty_bitmap.mark_tables` takes them."""
    first_open = 0
    while first_open < len(quick):
        first, tracker = first_open, quick[first_open][0]
        try:
            refused = dirty_bitmap.mark_tables(*tables[4 * first_open :])
            marked = len(quick) if refused < 0 else first_open + refused
            for tracker, version, _, _ in quick[first_open:marked]:
                tracker.version = version
                tracker.changes += 1
            first_open = marked + 1
            if refused >= 0:
                # An id of it is out of range, and none is marked: `after_step` finds out.
                tracker = quick[marked][0]
                unmarked_ids = tracker.after_step()
                if unmarked_ids is not None:
                    found.append((tracker, unmarked_ids))
        except Exception as error:
            # Versions of tables that were marked may not be noted: their next step finds out.
            tracker.give_up(error)
            first_open = max(first_open, first + 1)
            if came_from_handler(error):
                raise


def mark_together(found: Sequence[tuple[Tracker, Tensor]]) -> None:
    """Mark the ids that `Tracker.after_step` returned for several tables, in one launch per GPU."""
    by_device: dict[torch.device, list[tuple[Tracker, Tensor]]] = {}
    for tracker, ids in found:
        by_device.setdefault(tracker.bitmap.device, []).append((tracker, ids))
    for marks in by_device.values():
        try:
            # Safe to free ids afterwards: the allocator reuses their memory on this stream only.
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

"""Measures what rounding the rows of one batch changes in its loss, and leaves no trace.

Three forward passes of the batch: with the rows as they are, and with e added to them and taken off
again, where e is the error that storing the rows would make. Only rows that the batch looks up are
replaced. The live weights are never written, so threads may copy them meanwhile and no mark is set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.train_pipelines import as_written
from recpoint.trainer_plugin.loss.lookups import SmallTables
from recpoint.trainer_plugin.loss.price import LossPair
from recpoint.trainer_plugin.loss.table_watch import (
    AnswersLookups,
    RecordedIds,
    ReplacedRows,
    TableWatch,
    WatchedTable,
)
from recpoint.trainer_plugin.state import rng

__all__ = ["LossOfBatch", "MeasuredModel", "RoundedTable", "measure"]

#: The user's function: the loss of a batch, a tensor of one value.
LossOfBatch = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A model whose loss is measured, and what its forward passes touch beside it.

    Attributes:
        module: what the loss function is called with.
        is_sharded: whether TorchRec has sharded tables: their modules are complete after their
            first forward pass, and each forward pass exchanges with other ranks.
        pass_counts: returns tensors outside the model's buffers that forward passes change; small
            ones.
        staying: returns a context in which no lookup moves rows; lookups that would raise
            `embeddings.cache.slot_lookups.NotInSlots`.
    """

    module: nn.Module
    is_sharded: bool = False
    pass_counts: Callable[[], Sequence[Tensor]] = tuple
    staying: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class RoundedTable:
    """A table whose rows a checkpoint rounds.

    Attributes:
        name: name of the table.
        weight: its live weight [rows, dim], f64, f32, f16 or bf16, on the CPU.
        decoded: ids int64 [n] -> rows [n, dim] of the weight's dtype, as a restore would have them.
    """

    name: str
    weight: Tensor
    decoded: Callable[[Tensor], Tensor]


def measure(
    model: MeasuredModel, batch: Any, of: LossOfBatch, tables: Sequence[RoundedTable]
) -> LossPair:
    """Return what rounding costs in the loss of a batch; its values may be infinite or NaN.

    The model is used as it is, in training mode or not. Afterwards all its parameters, gradients,
    buffers and modes are as before, and so are the global random generators. Each forward pass
    draws the same random numbers.

    Args:
        model: the model.
        batch: a batch that the model has not been trained with since it was last restored.
        of: returns the loss.
        tables: the tables whose rows are rounded.

    Raises:
        SettingsError: `of` returns no positive loss, trains the model, or uses the weight of a
            table otherwise than by lookups.
        NotInSlots: the batch looks up rows that are not in the cache.
        Exception: `of` raised it.
    """
    watched = [WatchedTable(table.name, table.weight) for table in tables]
    with _unchanged(model) as passes:

        def loss(answers: AnswersLookups) -> float:
            passes.begin()
            with TableWatch(watched, answers):
                return _as_loss(of(model.module, batch))

        recorded = RecordedIds(len(tables))
        plain = loss(recorded)
        if not plain > 0.0 and plain == plain:
            raise _refused(f"a loss of {plain!r}", "a loss above zero, which shares are taken of")
        ids = [recorded.unique(index) for index in range(len(tables))]
        pairs = [_with_errors(table, own_ids) for table, own_ids in zip(tables, ids, strict=True)]
        names = [table.name for table in tables]
        added, taken_off = (
            loss(ReplacedRows(SmallTables(names, ids, rows)))
            for rows in ([pair.added for pair in pairs], [pair.taken_off for pair in pairs])
        )
    return LossPair(
        loss=plain, even=0.5 * (added + taken_off) - plain, odd=0.5 * (added - taken_off)
    )


class _ErrorPair(NamedTuple):
    """Rows with their errors of rounding added and taken off, [n, dim] of the weight's dtype."""

    added: Tensor
    taken_off: Tensor


def _with_errors(table: RoundedTable, ids: Tensor) -> _ErrorPair:
    rows = table.weight.detach()[ids]
    decoded = table.decoded(ids)
    if rows.dtype is torch.float64:
        return _ErrorPair(decoded, 2 * rows - decoded)
    opposite = 2 * rows.to(torch.float64) - decoded.to(torch.float64)
    return _ErrorPair(decoded, opposite.to(rows.dtype))


def _as_loss(value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise _refused(f"a {type(value).__name__}{shape}", "a tensor of one value: the loss of a batch")


def _refused(found: str, expected: str) -> SettingsError:
    return SettingsError(
        "Loss.of(model, batch)",
        found=found,
        expected=expected,
        next_step="see the docstring of recpoint.Loss",
    )


class _ForwardPasses:
    """Puts the model's buffers and the generators back before each forward pass.

    Args:
        measured: the model.
    """

    def __init__(self, measured: MeasuredModel) -> None:
        model = measured.module
        self._generators = rng.capture()
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, dict(module._buffers), {name: _copy(b) for name, b in module._buffers.items()})
            for module in model.modules()
            if module._buffers
        ]
        self._counts = [(count, count.clone()) for count in measured.pass_counts()]
        self._parameters = list(model.parameters())
        self._marks = self._parameter_marks()

    def begin(self) -> None:
        """Begin a pass as the first one began."""
        for module, buffers, copies in self._buffers:
            if not _are_same(module._buffers, buffers):
                module._buffers.clear()
                module._buffers.update(buffers)
            for name, copy in copies.items():
                buffer = buffers[name]
                if copy is not None and buffer is not None and not torch.equal(buffer, copy):
                    buffer.copy_(copy)
        for count, copy in self._counts:
            count.copy_(copy)
        for module, training in self._modes:
            module.training = training
        rng.restore(self._generators)

    def refuse_training(self) -> None:
        """Refuse passes that have changed a parameter or a gradient.

        Raises:
            SettingsError: they did.
        """
        if self._parameter_marks() != self._marks:
            raise _refused(
                "a function that changes parameters or their gradients",
                "a function that returns a loss, and calls neither backward() nor step()",
            )

    def _parameter_marks(self) -> list[tuple[int, int, int]]:
        return [
            (parameter._version, *_gradient_mark(parameter.grad))
            for parameter in self._parameters
            if not parameter.is_inference()
        ]


def _gradient_mark(gradient: Tensor | None) -> tuple[int, int]:
    """Return what changes with a gradient; TorchRec gives a new view of it at each access."""
    if gradient is None:
        return 0, 0
    is_strided = gradient.layout is torch.strided
    return gradient.data_ptr() if is_strided else id(gradient), gradient._version


def _are_same(buffers: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]) -> bool:
    return buffers.keys() == others.keys() and all(
        buffer is others[name] for name, buffer in buffers.items()
    )


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


@contextmanager
def _unchanged(model: MeasuredModel) -> Iterator[_ForwardPasses]:
    """Run forward passes as if nothing had happened."""
    with torch.no_grad(), _eager(), as_written(model.module), model.staying():
        passes = _ForwardPasses(model)
        try:
            yield passes
        finally:
            passes.begin()
        passes.refuse_training()


def _eager() -> AbstractContextManager[Any]:
    """Have compiled modules run as they were written: a graph would look rows up unseen."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled yet
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance

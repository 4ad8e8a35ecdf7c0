"""Which weights of a model are tables, and which models are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from recpoint.errors import SettingsError
from recpoint.format.dtypes import item_bytes
from recpoint.trainer_plugin.settings import Bits

__all__ = ["Lookup", "Table", "TableDtype", "find_tables", "parameter_names", "table_widths"]

Lookup = nn.Embedding | nn.EmbeddingBag

TableDtype = Literal["F64", "F32", "F16", "BF16"]

_TABLE_DTYPES: dict[torch.dtype, TableDtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_MAX_NAME = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """One embedding weight [rows, dim]; `name` is the full name of its module in the model."""

    name: str
    parameter_name: str
    module: Lookup

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: `model.to(device)` may have replaced its storage."""
        return self.module.weight

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.module.weight.shape[0]

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.module.weight.shape[1]

    @property
    def dtype(self) -> TableDtype:
        """The weight's dtype by its stored name."""
        return _TABLE_DTYPES[self.module.weight.dtype]

    @property
    def trained(self) -> bool:
        """Whether gradients reach it now."""
        return self.module.weight.requires_grad

    @property
    def changes(self) -> bool:
        """Whether anything changes its rows: max_norm does so at each lookup, trained or not."""
        return self.trained or self.module.max_norm is not None


def find_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Table, ...]:
    """All tables of `model`, in the order of its modules.

    Raises:
        SettingsError: two names for one table, a table that is trained by no optimizer, a
            parameter in two optimizers or outside the model, or a weight that cannot be stored.
    """
    if not isinstance(model, nn.Module):
        raise _refused("model", f"{model!r:.200}", "a torch.nn.Module", "pass the model itself")
    tables: list[Table] = []
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            earlier = owners.setdefault(id(parameter), full_name)
            is_table = isinstance(module, Lookup) and parameter_name == "weight"
            if earlier != full_name and (is_table or any(t.weight is parameter for t in tables)):
                raise _refused(
                    f"tables {earlier!r} and {full_name!r}",
                    "two names for one table (tied weights)",
                    "one module for each table",
                    "look rows up through one module, or give each module its own weight",
                )
            if is_table:
                assert isinstance(module, Lookup)
                tables.append(Table(name=name or "weight", parameter_name=full_name, module=module))
    _refuse_unknown_parameters(optimizers, owners)
    for table in tables:
        _check(table, optimizers)
    _refuse_overlaps(tables)
    return tuple(tables)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter -> its full name in the model; a tied one has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def table_widths(
    tables: Sequence[Table], bits: Bits, table_bits: Mapping[str, Bits]
) -> dict[str, int]:
    """Table name -> bits of a stored value; the dtype's own width: stored exactly.

    Raises:
        SettingsError: `table_bits` names a table that there is not, or that is not trained.
    """
    known = {table.name: table for table in tables}
    for name in table_bits:
        if name not in known:
            raise _refused(
                f"table_bits[{name!r}]",
                "no such table",
                f"one of {sorted(known)!r:.400}",
                "use the name of the embedding module, as in model.named_modules()",
            )
        if not known[name].changes:
            raise _refused(
                f"table_bits[{name!r}]",
                "a table that is not trained (requires_grad=False)",
                "a table whose rows change",
                "take it out of table_bits: it is stored once, in fulls",
            )
    widths = {}
    for table in tables:
        # A frozen table is stored seldom and cannot recover from a rounding: keep its bytes.
        wanted = table_bits.get(table.name, bits if table.changes else "lossless")
        widths[table.name] = 8 * item_bytes(table.dtype) if wanted == "lossless" else wanted
    return widths


def _check(table: Table, optimizers: Sequence[Optimizer]) -> None:
    subject, weight = f"table {table.name!r}", table.weight
    if isinstance(weight, UninitializedParameter):
        raise _refused(subject, "a lazy weight", "a weight with a shape", "run one batch first")
    if weight.layout is not torch.strided or not weight.is_contiguous() or weight.dim() != 2:
        raise _refused(
            subject,
            f"a weight with strides {weight.stride()}",
            "a contiguous weight [rows, dim]",
            "build the module with a contiguous weight",
        )
    if weight.numel() == 0:
        raise _refused(
            subject, f"shape {tuple(weight.shape)}", "one row and one value at least", "remove it"
        )
    if len(table.name) > _MAX_NAME:
        raise _refused(subject, f"{len(table.name)} characters", f"at most {_MAX_NAME}", "rename")
    if weight.dtype not in _TABLE_DTYPES:
        known = ", ".join(map(str, _TABLE_DTYPES))
        raise _refused(subject, str(weight.dtype), known, "change its dtype")
    if table.trained and not any(_holds(optimizer, weight) for optimizer in optimizers):
        raise _refused(
            subject,
            "a weight that requires gradients and is in no optimizer",
            "each table trained by one optimizer, or frozen",
            "pass its optimizer to Checkpointer, or set weight.requires_grad_(False)",
        )


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(parameter is other for group in optimizer.param_groups for other in group["params"])


def _refuse_unknown_parameters(optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise _refused(
                f"optimizers[{number}]",
                type(optimizer).__name__,
                "a torch.optim.Optimizer",
                "pass the optimizer itself, not a wrapper",
            )
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                subject = f"optimizers[{number}], parameter {position}"
                if id(parameter) not in names:
                    raise _refused(
                        subject,
                        f"a parameter of shape {tuple(parameter.shape)} outside the model",
                        "parameters of the model only: the others would not be saved",
                        "pass a model that contains it, or an optimizer without it",
                    )
                if seen.setdefault(id(parameter), number) != number:
                    raise _refused(
                        subject,
                        f"{names[id(parameter)]!r}, which optimizer {seen[id(parameter)]} has too",
                        "each parameter in one optimizer",
                        "take it out of one of the two",
                    )


def _refuse_overlaps(tables: Sequence[Table]) -> None:
    spans = sorted(
        (
            (table.weight.device.type, table.weight.device.index or 0, table.weight.data_ptr()),
            table.weight.nbytes,
            table.name,
        )
        for table in tables
        if not table.weight.is_meta
    )
    for (place, size, name), (next_place, _, next_name) in zip(spans, spans[1:], strict=False):
        if place[:2] == next_place[:2] and place[2] + size > next_place[2]:
            raise _refused(
                f"tables {name!r} and {next_name!r}",
                "two names for one table (their weights share memory)",
                "weights that do not overlap",
                "give each module its own weight",
            )


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)

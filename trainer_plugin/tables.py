"""Which weights of a model are tables, and which models are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from recpoint.catalog.restoring.names import canonical_name
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.dense_pieces import is_piece
from recpoint.trainer_plugin.settings import several
from recpoint.trainer_plugin.table import TABLE_DTYPES, Lookup, ModuleTable, Table
from recpoint.trainer_plugin.table_source import TableSource, find_sources

__all__ = [
    "Found",
    "find_tables",
    "group_names",
    "modules_of",
    "optimizer_list",
    "parameter_names",
    "refuse_other_tables",
]

_MAX_NAME = 1024


class Found(NamedTuple):
    """What a model and its optimizers are made of.

    Attributes:
        tables: plain modules in the order of the model, then those of sources.
        optimizers: without those that train tables of sources alone.
        sources: what supplies tables of another kind.
    """

    tables: tuple[Table, ...]
    optimizers: tuple[Optimizer, ...]
    sources: tuple[TableSource, ...]


def find_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Found:
    """All tables of `model`.

    Raises:
        SettingsError: two names for one table, a table that is trained by no optimizer, a
            parameter in two optimizers or outside the model, a weight that cannot be stored, or
            state of which ranks hold different parts without saying which.
    """
    if not isinstance(model, nn.Module):
        raise _refused("model", f"{model!r:.200}", "a torch.nn.Module", "pass the model itself")
    _refuse_unnamed_shards(model, optimizers)
    sources = tuple(find_sources(model))
    for source in sources:
        optimizers = source.optimizers(optimizers)
    tables: list[Table] = []
    owners: dict[int, str] = {}
    for name, module in modules_of(model, sources):
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
                    "look rows up through one module, as emb(ids), and use its weight elsewhere "
                    "without giving it to a second one, as F.linear(x, emb.weight); or give each "
                    "module its own weight",
                )
            if is_table:
                assert isinstance(module, Lookup)
                tables.append(
                    ModuleTable(name=name or "weight", parameter_name=full_name, module=module)
                )
    theirs = [table for source in sources for table in source.tables]
    owners |= {id(table.weight): table.parameter_name for table in theirs if not table.fused}
    _refuse_unknown_parameters(optimizers, owners)
    tables += theirs
    for table in tables:
        _check(table, optimizers)
    _refuse_one_key(tables)
    _refuse_overlaps(tables)
    return Found(tuple(tables), tuple(optimizers), sources)


def _refuse_unnamed_shards(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what gives each rank other values in a tensor that looks whole.

    Its values would be stored as those that all ranks have, and restored to ranks that had others.
    """
    # Who has one has imported it, which takes a while.
    flat: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in model.named_modules():
        if isinstance(module, flat):
            raise _refused(
                f"module {name!r}" if name else "the model",
                "FullyShardedDataParallel, whose flat parameters do not say which part is where",
                "torch.distributed.fsdp.fully_shard (FSDP2), DDP, or no wrapper",
                "use fully_shard on the dense layers",
            )
    zero: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, zero):
            raise _refused(
                f"optimizers[{number}]",
                "ZeroRedundancyOptimizer, of which each rank has the state of other parameters",
                "an optimizer whose state each rank has for what it holds",
                "use fully_shard on the dense layers, which divides their optimizer's state too",
            )


def modules_of(
    model: nn.Module, sources: Sequence[TableSource] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Canonical name and module of all that no source answers for; each module once."""
    theirs = tuple(name for source in sources for name in source.modules)
    below = tuple(f"{name}." if name else "" for name in theirs)
    for name, module in model.named_modules():
        if name not in theirs and not name.startswith(below):
            yield canonical_name(model, name), module


def optimizer_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimizer or several as a list.

    Raises:
        SettingsError: it is neither.
    """
    given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    return several("optimizers", given)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter -> its canonical name in the model; a tied one has its first name."""
    return {
        id(parameter): canonical_name(model, name) for name, parameter in model.named_parameters()
    }


def group_names(
    names: Mapping[int, str], group: Mapping[str, Any], optimizer: int, position: int
) -> list[str]:
    """Names of the parameters of one group, in its order.

    Args:
        names: as `parameter_names` returns them, of the model as it is now.
        group: of an optimizer.
        optimizer: its number.
        position: of the group in it.

    Raises:
        SettingsError: one is not in the model, or not any more.
    """
    found = []
    for index, parameter in enumerate(group["params"]):
        name = names.get(id(parameter))
        if name is None:
            raise _refused(
                _place(optimizer, position, index),
                f"a parameter of shape {tuple(parameter.shape)} outside the model",
                "parameters of the model only: the others would not be saved",
                "pass a model that contains it, or an optimizer without it; build both anew where "
                "a module or a weight was replaced",
            )
        found.append(name)
    return found


def _place(optimizer: int, group: int, index: int) -> str:
    return f"optimizers[{optimizer}], group {group}, parameter {index}"


def refuse_other_tables(lookups: Mapping[str, Tensor], tables: Sequence[Table]) -> None:
    """Refuse to store a model that has come to other tables than when its tables were found.

    It would be built with them when it is restored, and could not be.

    Args:
        lookups: name of each plain embedding module of the model -> its weight, now.
        tables: those that are stored as tables, without those of sources.

    Raises:
        SettingsError: one was added, replaced or removed.
    """
    known = {id(table.weight) for table in tables}
    for name, weight in lookups.items():
        if id(weight) not in known:
            raise _refused(
                f"table {name or 'weight'!r}",
                "an embedding that was added, or put in place of another, after the Checkpointer "
                "was built",
                f"the tables that there were then: {sorted(table.name for table in tables)!r:.400}",
                "build the Checkpointer after the model is complete",
            )
    there = {id(weight) for weight in lookups.values()}
    for table in tables:
        if id(table.weight) not in there:
            raise _refused(
                f"table {table.name!r}",
                "no such module in the model any more",
                "the tables that there were when the Checkpointer was built",
                "build the Checkpointer after the model is complete",
            )


def _check(table: Table, optimizers: Sequence[Optimizer]) -> None:
    subject, weight = f"table {table.name!r}", table.weight
    if isinstance(weight, UninitializedParameter):
        raise _refused(subject, "a lazy weight", "a weight with a shape", "run one batch first")
    if is_piece(weight):
        raise _refused(
            subject,
            "a weight that fully_shard has cut",
            "a table that is whole on each rank, or one that a library of sharded embeddings cuts",
            "apply fully_shard to the dense layers and leave embeddings out of it",
        )
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
    if weight.dtype not in TABLE_DTYPES:
        known = ", ".join(map(str, TABLE_DTYPES))
        raise _refused(subject, str(weight.dtype), known, "change its dtype")
    if (
        table.trained
        and not table.fused
        and not any(_holds(optimizer, weight) for optimizer in optimizers)
    ):
        raise _refused(
            subject,
            "a weight that requires gradients and is in no optimizer",
            "each table trained by one optimizer, or frozen",
            "pass its optimizer to Checkpointer, or set weight.requires_grad_(False)",
        )

    for number, optimizer in enumerate(optimizers):
        if not hasattr(optimizer, "_optimizer_step_post_hooks") and _holds(optimizer, weight):
            raise _refused(
                f"optimizers[{number}]",
                f"a {type(optimizer).__name__}, which trains {subject} and whose steps call no "
                "hooks",
                "an optimizer whose steps can be watched",
                "pass the optimizer inside the wrapper, as it was before Accelerate's prepare()",
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
        for position, group in enumerate(optimizer.param_groups):
            group_names(names, group, number, position)
            for index, parameter in enumerate(group["params"]):
                if seen.setdefault(id(parameter), number) != number:
                    raise _refused(
                        _place(number, position, index),
                        f"{names[id(parameter)]!r}, which optimizer {seen[id(parameter)]} has too",
                        "each parameter in one optimizer",
                        "take it out of one of the two",
                    )


def _refuse_one_key(tables: Sequence[Table]) -> None:
    seen: set[str] = set()
    for table in tables:
        if table.key in seen:
            raise _refused(
                f"table {table.key!r}",
                "two tables of one name",
                "one name for each table, whatever library it comes from",
                "rename one of them",
            )
        seen.add(table.key)


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

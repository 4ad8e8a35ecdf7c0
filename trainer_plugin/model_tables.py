"""Finds a model's tables and their optimizers, and refuses what cannot be stored."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restoring.names import canonical_name
from recpoint.embeddings.tables import Table, TableSource, plain_tables, refuse_unstorable
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.dense_pieces import is_piece
from recpoint.trainer_plugin.integrations import find_sources
from recpoint.trainer_plugin.setting_checks import several

__all__ = [
    "Found",
    "find_tables",
    "group_names",
    "optimizer_list",
    "parameter_names",
]


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
    tables, names = plain_tables(model, sources)
    theirs = [table for source in sources for table in source.tables]
    names |= {id(table.weight): table.parameter_name for table in theirs if not table.fused}
    _refuse_unknown_parameters(optimizers, names)
    tables += theirs
    for table in tables:
        _refuse_piece(table)
    refuse_unstorable(tables)
    for table in tables:
        _refuse_untrained(table, optimizers)
        _refuse_unwatched(table, optimizers)
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


def _refuse_piece(table: Table) -> None:
    if is_piece(table.weight):
        raise _refused(
            f"table {table.name!r}",
            "a weight that fully_shard has cut",
            "a table that is whole on each rank, or one that a library of sharded embeddings cuts",
            "apply fully_shard to the dense layers and leave embeddings out of it",
        )


def _refuse_untrained(table: Table, optimizers: Sequence[Optimizer]) -> None:
    needs_one = table.trained and not table.fused
    if needs_one and not any(_holds(optimizer, table.weight) for optimizer in optimizers):
        raise _refused(
            f"table {table.name!r}",
            "a weight that requires gradients and is in no optimizer",
            "each table trained by one optimizer, or frozen",
            "pass its optimizer to Checkpointer, or set weight.requires_grad_(False)",
        )


def _refuse_unwatched(table: Table, optimizers: Sequence[Optimizer]) -> None:
    for number, optimizer in enumerate(optimizers):
        watched = hasattr(optimizer, "_optimizer_step_post_hooks")
        if not watched and _holds(optimizer, table.weight):
            raise _refused(
                f"optimizers[{number}]",
                f"a {type(optimizer).__name__}, which trains table {table.name!r} and whose steps "
                "call no hooks",
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


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)

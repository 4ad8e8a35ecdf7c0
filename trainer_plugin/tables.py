"""Finds the tables of a model and its sharded dense tensors; refuses models that do not fit.

Dense tensors of which this rank holds a piece (`fully_shard`); stored as pieces, format §3.4. If a
mesh both shards and replicates, several ranks hold a piece, and the first of them stores it. If a
tensor lies on several meshes, `ranks.sharding` says which mesh stores it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.dense import DenseShard, fill_part, has_part, join_shards
from recpoint.catalog.restore.in_place import fits, shares_memory, write
from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.tables import Table, TableSource, plain_tables, refuse_unstorable
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations import find_sources
from recpoint.trainer_plugin.setting_checks import several

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Stored",
    "are_pieces",
    "can_hold",
    "find_tables",
    "form_of",
    "group_names",
    "hold_pieces",
    "is_piece",
    "lacks_some",
    "layout_text",
    "optimizer_list",
    "parameter_names",
    "piece_of",
    "restored_like",
    "write_into",
]


#: A dense tensor as a checkpoint holds it: whole, or as the pieces of all ranks.
Stored = Tensor | Sequence[DenseShard]


def is_piece(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is a `DTensor`, of which this rank holds only a piece."""
    # Code that made a DTensor has imported this module. Importing it here would take long.
    tensor_module = sys.modules.get("torch.distributed.tensor")
    return tensor_module is not None and isinstance(tensor, tensor_module.DTensor)


def hold_pieces(model: nn.Module) -> None:
    """Put modules that `fully_shard` has cut back into pieces, if they are whole. Not collective.

    After a forward pass without a backward pass, as in an evaluation, the outermost modules keep
    whole parameters, which are not the tensors that the optimizer has. The next forward pass
    gathers the pieces again.
    """
    module_type = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if module_type is not None:
        for module in model.modules():
            if isinstance(module, module_type):
                module.reshard()


def are_pieces(value: object) -> TypeGuard[Sequence[DenseShard]]:
    """Whether the value is a tensor stored in pieces, and not a list that the user stored."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], DenseShard)


def piece_of(tensor: DTensor) -> dict[str, Any] | None:
    """Return this rank's piece for the state tree; None if another rank of its mesh stores it."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(
        place.is_replicate() and coordinate_place
        for place, coordinate_place in zip(tensor.placements, coordinate, strict=True)
    ):
        return None
    local = tensor.to_local()
    return {
        "shard_of": list(tensor.shape),
        "at": list(_offset(tensor)),
        "tensor": local.detach(),
    }


def lacks_some(live: Tensor, stored: Stored, *, name: str) -> bool:
    """Whether `stored` lacks pieces that `write_into` or `restored_like` would need.

    Args:
        live: a parameter or buffer.
        stored: its stored form, or a part of its optimizer state; pieces of all or some ranks.
        name: name of the tensor, for errors.
    """
    if isinstance(stored, Tensor):
        return False
    shape, _ = form_of(stored)
    if shape == tuple(live.shape):
        local, offset = _local(live)
        sizes = local.shape
    else:  # optimizer state of another shape, all of which is needed
        offset, sizes = (0,) * len(shape), torch.Size(shape)
    if not sizes.numel():
        return False
    return not has_part(
        stored, [range(a, a + n) for a, n in zip(offset, sizes, strict=True)], name=name
    )


def write_into(live: Tensor, stored: Stored, *, name: str) -> None:
    """Write a stored tensor into `live`, in place, or the part of it that this rank holds.

    Args:
        live: a parameter or buffer; the caller has checked its shape and dtype, and `can_hold`.
        stored: its stored form.
        name: name of the tensor, for errors.
    """
    with torch.no_grad():
        local, offset = _local(live)
        if not local.numel():
            return
        if isinstance(stored, Tensor) and stored.is_sparse:
            local.copy_(stored)  # a sparse tensor is always whole and cannot be sliced
        elif isinstance(stored, Tensor):
            box = tuple(slice(a, a + n) for a, n in zip(offset, local.shape, strict=True))
            write(local, stored[box])
        elif shares_memory(local):
            write(local, join_shards(stored, name=name))
        else:
            fill_part(stored, offset, local.detach(), name=name)


def can_hold(live: Tensor, stored: Stored, *, name: str) -> bool:
    """Whether `live` can hold a stored tensor of its shape and dtype.

    It cannot if elements share memory here and differ in the checkpoint.

    Args:
        live: a parameter or buffer.
        stored: its stored form.
        name: name of the tensor, for errors.
    """
    if is_piece(live) or not shares_memory(live):
        return True
    return fits(live, stored if isinstance(stored, Tensor) else join_shards(stored, name=name))


def restored_like(parameter: Tensor, stored: Stored, *, name: str) -> Tensor:
    """Return stored optimizer state of a parameter, cut as the parameter is.

    If the state has another shape than the parameter, it is returned whole.

    Args:
        parameter: the parameter; may be a piece.
        stored: the state as the checkpoint holds it.
        name: name of the state, for errors.
    """
    shape, _ = form_of(stored)
    if not is_piece(parameter) or shape != tuple(parameter.shape):
        return stored if isinstance(stored, Tensor) else join_shards(stored, name=name)
    dtype = stored.dtype if isinstance(stored, Tensor) else stored[0].tensor.dtype
    local = torch.empty_like(parameter.to_local(), dtype=dtype, requires_grad=False)
    from torch.distributed.tensor import DTensor

    restored = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    write_into(restored, stored, name=name)
    return restored


def form_of(stored: Stored) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape of the whole tensor, and its dtype."""
    if isinstance(stored, Tensor):
        return tuple(stored.shape), stored.dtype
    return stored[0].shape, stored[0].tensor.dtype


def layout_text(stored: Stored) -> str:
    """Return the sparse layout as the end of a sentence about the shape; empty if not sparse."""
    if not isinstance(stored, Tensor) or not stored.is_sparse:
        return ""
    return f", sparse in {stored.sparse_dim()} of its dimensions"


def _local(live: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if is_piece(live):
        return live.to_local(), _offset(live)
    return live, (0,) * live.dim()


def _offset(tensor: DTensor) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # The offset of an empty piece may lie behind the end of the tensor.
    return tuple(min(start, size) for start, size in zip(offset, tensor.shape, strict=True))


class ModelTables(NamedTuple):
    """The result of `find_tables`.

    Attributes:
        tables: tables of plain modules in the order of the model, then tables of sources.
        optimizers: the optimizers, without those that train only tables of sources.
        sources: the libraries that supply tables in their own form.
    """

    tables: tuple[Table, ...]
    optimizers: tuple[Optimizer, ...]
    sources: tuple[TableSource, ...]


def find_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> ModelTables:
    """Find all tables of `model`.

    Raises:
        SettingsError: a table has two names, or no optimizer trains it; a parameter is in two
            optimizers or outside the model; a weight cannot be stored; or a wrapper gives ranks
            different parts of a tensor without saying which.
    """
    if not isinstance(model, nn.Module):
        raise _refused("model", f"{model!r:.200}", "a torch.nn.Module", "pass the model itself")
    _refuse_unnamed_shards(model, optimizers)
    sources = tuple(find_sources(model))
    for source in sources:
        optimizers = source.optimizers(optimizers)
    tables, names = plain_tables(model, sources)
    source_tables = [table for source in sources for table in source.tables]
    names |= {id(table.weight): table.parameter_name for table in source_tables if not table.fused}
    _refuse_unknown_parameters(optimizers, names)
    tables += source_tables
    for table in tables:
        _refuse_piece(table)
    refuse_unstorable(tables)
    for table in tables:
        _refuse_untrained(table, optimizers)
        _refuse_unwatched(table, optimizers)
    return ModelTables(tuple(tables), tuple(optimizers), sources)


def _refuse_unnamed_shards(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse wrappers that give each rank other values in a tensor that looks whole.

    One rank's values would be stored for all ranks, and restored to ranks that had other values.
    """
    # Code that made such a module has imported this one. Importing it here would take long.
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
                "ZeroRedundancyOptimizer, which keeps the state of other parameters on each rank",
                "an optimizer that keeps the state of each parameter on the rank that holds it",
                "use fully_shard on the dense layers, which divides their optimizer's state too",
            )


def optimizer_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list.

    Raises:
        SettingsError: `optimizers` is neither an optimizer nor a sequence.
    """
    listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    return several("optimizers", listed)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map `id()` of each parameter to its canonical name; a tied parameter gets its first name."""
    return {
        id(parameter): canonical_name(model, name) for name, parameter in model.named_parameters()
    }


def group_names(
    names: Mapping[int, str], group: Mapping[str, Any], optimizer: int, position: int
) -> list[str]:
    """Return the names of the parameters of one group, in its order.

    Args:
        names: as `parameter_names` returns them, for the model as it is now.
        group: a parameter group of an optimizer.
        optimizer: number of the optimizer, for the message.
        position: position of the group in the optimizer, for the message.

    Raises:
        SettingsError: a parameter is not in the model, or no longer in it.
    """
    names_in_group = []
    for index, parameter in enumerate(group["params"]):
        name = names.get(id(parameter))
        if name is None:
            raise _refused(
                _place(optimizer, position, index),
                f"a parameter of shape {tuple(parameter.shape)} outside the model",
                "only parameters of the model, because others would not be saved",
                "pass a model that contains it, or an optimizer without it; if a module or a "
                "weight was replaced, build optimizer and Checkpointer anew",
            )
        names_in_group.append(name)
    return names_in_group


def _place(optimizer: int, group: int, index: int) -> str:
    return f"optimizers[{optimizer}], group {group}, parameter {index}"


def _refuse_piece(table: Table) -> None:
    if is_piece(table.weight):
        raise _refused(
            f"table {table.name!r}",
            "a weight that fully_shard has cut",
            "a table that is whole on each rank, or that a library of sharded embeddings has cut",
            "apply fully_shard only to the dense layers, not to embeddings",
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
    return any(
        parameter is group_parameter
        for group in optimizer.param_groups
        for group_parameter in group["params"]
    )


def _refuse_unknown_parameters(optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
    owner_numbers: dict[int, int] = {}
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
                if owner_numbers.setdefault(id(parameter), number) != number:
                    raise _refused(
                        _place(number, position, index),
                        f"{names[id(parameter)]!r}, which is also in optimizer "
                        f"{owner_numbers[id(parameter)]}",
                        "each parameter in one optimizer",
                        "remove it from one of the two optimizers",
                    )


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)

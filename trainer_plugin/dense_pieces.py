"""Dense tensors of which this rank holds a piece (`fully_shard`): stored as pieces, format §3.4.

A piece that several ranks hold, where a mesh both shards and replicates, is stored by the first; of
several meshes, `piece_layout` says which stores a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from recpoint.catalog.chunks.dense_shards import DenseShard, fill_part, has_part, join_shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Stored",
    "are_pieces",
    "form_of",
    "hold_pieces",
    "is_piece",
    "layout_text",
    "lacks_some",
    "piece_of",
    "restored_like",
    "write_into",
]

#: A dense tensor as a checkpoint has it: whole, or the pieces of all ranks.
Stored = Tensor | Sequence[DenseShard]


def is_piece(tensor: object) -> TypeGuard[DTensor]:
    """Whether only a piece of it is here."""
    # Who has one has imported it, which takes a while.
    there = sys.modules.get("torch.distributed.tensor")
    return there is not None and isinstance(tensor, there.DTensor)


def hold_pieces(model: nn.Module) -> None:
    """Have what `fully_shard` has cut be in pieces: not collective, and nothing where it is.

    After a forward pass without a backward one, as in an evaluation, its outermost modules keep
    their parameters whole, and these are not what the optimizer has. The next pass gathers anew.
    """
    module_type = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if module_type is not None:
        for module in model.modules():
            if isinstance(module, module_type):
                module.reshard()


def are_pieces(value: object) -> TypeGuard[Sequence[DenseShard]]:
    """Whether it is a tensor that was stored in pieces, and no list of the user's."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], DenseShard)


def piece_of(tensor: DTensor) -> dict[str, Any] | None:
    """The piece that is here, for the state tree; None: another rank of its mesh stores it."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(
        place.is_replicate() and at for place, at in zip(tensor.placements, coordinate, strict=True)
    ):
        return None
    local = tensor.to_local()
    return {
        "shard_of": list(tensor.shape),
        "at": list(_offset(tensor)),
        "tensor": local.detach(),
    }


def lacks_some(here: Tensor, stored: Stored, *, name: str) -> bool:
    """Whether pieces that `write_into`, or `restored_like`, would need are not among these.

    Args:
        here: a parameter or buffer.
        stored: it, or a part of its optimizer's state; pieces of all ranks, or of some.
        name: for errors.
    """
    if isinstance(stored, Tensor):
        return False
    shape, _ = form_of(stored)
    if shape == tuple(here.shape):
        local, at = _local(here)
        sizes = local.shape
    else:  # state of another shape, which is needed whole
        at, sizes = (0,) * len(shape), torch.Size(shape)
    if not sizes.numel():
        return False
    return not has_part(
        stored, [range(a, a + n) for a, n in zip(at, sizes, strict=True)], name=name
    )


def write_into(here: Tensor, stored: Stored, *, name: str) -> None:
    """Write a tensor, or what is here of it, in place; shapes and dtypes have been checked."""
    with torch.no_grad():
        local, at = _local(here)
        if not local.numel():
            return
        if isinstance(stored, Tensor) and stored.is_sparse:
            local.copy_(stored)  # never a piece, and nothing can be cut out of it
        elif isinstance(stored, Tensor):
            box = tuple(slice(a, a + n) for a, n in zip(at, local.shape, strict=True))
            local.copy_(stored[box])
        else:
            fill_part(stored, at, local, name=name)


def restored_like(parameter: Tensor, stored: Stored, *, name: str) -> Tensor:
    """Optimizer state of a parameter: cut as the parameter is, where it has its shape.

    Else the whole of it, where the checkpoint had it.
    """
    shape, _ = form_of(stored)
    if not is_piece(parameter) or shape != tuple(parameter.shape):
        return stored if isinstance(stored, Tensor) else join_shards(stored, name=name)
    dtype = stored.dtype if isinstance(stored, Tensor) else stored[0].tensor.dtype
    local = torch.empty_like(parameter.to_local(), dtype=dtype, requires_grad=False)
    from torch.distributed.tensor import DTensor

    found = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    write_into(found, stored, name=name)
    return found


def form_of(stored: Stored) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape of the whole, and dtype."""
    if isinstance(stored, Tensor):
        return tuple(stored.shape), stored.dtype
    return stored[0].shape, stored[0].tensor.dtype


def layout_text(stored: Stored) -> str:
    """How a sparse tensor lies in memory, as the end of a sentence on its shape; else empty."""
    if not isinstance(stored, Tensor) or not stored.is_sparse:
        return ""
    return f", sparse in {stored.sparse_dim()} of its dimensions"


def _local(here: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if is_piece(here):
        return here.to_local(), _offset(here)
    return here, (0,) * here.dim()


def _offset(tensor: DTensor) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # Of an empty piece it may lie behind the end.
    return tuple(min(at, size) for at, size in zip(offset, tensor.shape, strict=True))

"""Which rank stores which pieces of dense tensors that lie on several meshes.

The ranks of a mesh make up a tensor that lies on it. Another mesh may make up the same one again:
under data and tensor parallelism the meshes `mesh["tp"]` of all replicas, and the meshes
`mesh["dp"]` of a layer that is in no tensor-parallel plan. The mesh with the lowest rank stores it,
with what the optimizers have of it; a mesh that replicates does so itself
(`dense_pieces.piece_of`). It is settled when training starts, so that a cut asks nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from recpoint.catalog.chunks.dense_shards import fault_of_boxes, is_shard
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.dense_pieces import is_piece, piece_of

__all__ = [
    "HeldPiece",
    "balance",
    "held_pieces",
    "local_pieces",
    "stored_elsewhere",
    "without_pieces",
]


class HeldPiece(NamedTuple):
    """What a rank says of a tensor that it has a piece of.

    Attributes:
        form: shape of the whole, and dtype.
        mesh: the lowest rank of the mesh that it lies on.
        box: where the piece begins, and its shape; None: another rank of the mesh stores it.
    """

    form: tuple[tuple[int, ...], str]
    mesh: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None


def held_pieces(tensors: Mapping[str, Tensor]) -> dict[str, HeldPiece]:
    """Of those of a rank's dense tensors that are in pieces, by name."""
    found: dict[str, HeldPiece] = {}
    for name, tensor in tensors.items():
        if is_piece(tensor):
            piece = piece_of(tensor)
            found[name] = HeldPiece(
                form=(tuple(tensor.shape), str(tensor.dtype)),
                mesh=int(tensor.device_mesh.mesh.min()),
                box=None if piece is None else (tuple(piece["at"]), tuple(piece["tensor"].shape)),
            )
    return found


def local_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is here of those that are in pieces, by name."""
    return {name: one.to_local().detach() for name, one in tensors.items() if is_piece(one)}


def stored_elsewhere(held: Sequence[Mapping[str, HeldPiece]], rank: int) -> frozenset[str]:
    """The tensors of which other ranks store all that this one has.

    Args:
        held: what each rank has, in the order of ranks.
        rank: this one.

    Raises:
        SettingsError: a rank has no piece of one, or another shape; or what is stored would not
            make one up.
    """
    settled: set[object] = set()  # layers of one shape are cut alike
    for name in sorted(set().union(*held)):
        by_rank = [of_rank.get(name) for of_rank in held]
        layout = tuple(by_rank)
        if layout not in settled:
            fault = _fault(by_rank)
            if fault is not None:
                raise SettingsError(
                    f"the dense tensor {name!r}, of which ranks have pieces",
                    found=fault,
                    expected="pieces that make it up, over the ranks of each mesh that it lies on",
                    next_step="give each rank the model that it trains, and divide each layer in "
                    "the same way on all ranks",
                )
            settled.add(layout)
    return frozenset(
        name
        for name, one in held[rank].items()
        if one.mesh != min(of_rank[name].mesh for of_rank in held)
    )


def balance(held: Sequence[Mapping[str, HeldPiece]], rank: int) -> dict[str, int]:
    """How often a number of each piece that is here counts, so that over all ranks they add to 0.

    If the numbers are the same where the pieces are: a piece that is not stored counts once, and
    against it each time the one that is stored in its place. Tensors of one mesh are left out, and
    pieces of a mesh that cuts otherwise: their values are not compared.

    Args:
        held: what each rank has, in the order of ranks; `stored_elsewhere` has found no fault.
        rank: this one.
    """
    found: dict[str, int] = {}
    for name, own in held[rank].items():
        by_rank = [of_rank[name] for of_rank in held]
        first = min(one.mesh for one in by_rank)
        stored = {one.box for one in by_rank if one.mesh == first}
        if own.box is None or own.box not in stored:
            continue
        others = sum(one.mesh != first and one.box == own.box for one in by_rank)
        if others:
            found[name] = 1 if own.mesh != first else -others
    return found


def _fault(by_rank: Sequence[HeldPiece | None]) -> str | None:
    forms: dict[object, list[int]] = {}
    for rank, one in enumerate(by_rank):
        forms.setdefault(None if one is None else one.form, []).append(rank)
    if len(forms) > 1:
        return "; ".join(f"{form or 'no piece'} on ranks {on}" for form, on in forms.items())
    there = [one for one in by_rank if one is not None]
    first = min(one.mesh for one in there)
    boxes = [
        [range(a, a + n) for a, n in zip(*one.box, strict=True)]
        for one in there
        if one.mesh == first and one.box is not None
    ]
    return fault_of_boxes(there[0].form[0], boxes)


def without_pieces(tree: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A rank's state tree without the pieces of these tensors, and of what optimizers have of them.

    What is no piece stays, as a count of steps that each rank has.
    """
    tensors = {
        name: value
        for name, value in tree["model"]["tensors"].items()
        if name not in names or not is_shard(value)
    }
    optimizers = []
    for one in tree["optimizers"]:
        state = {
            name: _without(entry) if name in names else entry
            for name, entry in one["state"].items()
        }
        optimizers.append({**one, "state": state})
    return {**tree, "model": {**tree["model"], "tensors": tensors}, "optimizers": optimizers}


def _without(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if not is_shard(value)}
    return {**entry, "values": values}

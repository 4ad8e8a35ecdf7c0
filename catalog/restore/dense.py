"""Joins dense tensors of which several ranks hold a piece each, wholly or in part.

A piece is a dictionary in a rank's state tree (format §3.4): `shard_of` is the shape of the whole
tensor, `at` is the index of the piece's first element in it, `tensor` is the piece. The pieces of
all ranks are disjoint and make up the whole tensor. A piece without elements is ignored. A piece
that several ranks hold with the same bits counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpoint.errors import MalformedObject

__all__ = [
    "DenseShard",
    "check_shards",
    "dense_shards",
    "fault_of_boxes",
    "fill_part",
    "has_part",
    "is_shard",
    "join_shards",
    "parse_shard",
]


_KEYS: Final = frozenset(("shard_of", "at", "tensor"))
_MOST: Final = 2**48  # most elements along a dimension; tables have the same bound on rows


@dataclass(frozen=True, kw_only=True)
class DenseShard:
    """A piece, checked without regard to other pieces.

    Attributes:
        shape: shape of the whole tensor.
        at: index of the piece's first element in the whole tensor.
        tensor: the piece.
    """

    shape: tuple[int, ...]
    at: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> tuple[range, ...]:
        """The indices that the piece holds, along each dimension."""
        return _box(self.at, self.tensor)


def is_shard(node: object) -> bool:
    """Tell whether a node of a state tree is a piece of a tensor."""
    return isinstance(node, Mapping) and node.keys() == _KEYS


def parse_shard(node: object, *, name: str) -> DenseShard:
    """Parse a piece from a state tree; `name` is the tensor's, for errors.

    Raises:
        MalformedObject: the node is not a piece, or does not lie within its `shard_of`.
    """
    if not isinstance(node, Mapping) or node.keys() != _KEYS:
        raise _malformed(name, f"{type(node).__name__}", "a piece: shard_of, at, tensor")
    shape, offsets, tensor = node["shard_of"], node["at"], node["tensor"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and isinstance(tensor, Tensor)):
        node_text = f"shard_of {shape!r:.80}, at {offsets!r:.80}, tensor a {type(tensor).__name__}"
        raise _malformed(name, node_text, "two lists of integers from 0 on, and a tensor")
    if tensor.is_sparse:
        raise _malformed(name, "a sparse piece", "a dense one")
    shard = DenseShard(shape=tuple(shape), at=tuple(offsets), tensor=tensor)
    if not (
        len(shard.shape) == len(shard.at) == tensor.dim()
        and all(part.stop <= size for part, size in zip(shard.box, shard.shape, strict=True))
    ):
        node_text = f"a piece of {list(tensor.shape)} at {list(shard.at)}"
        raise _malformed(name, node_text, f"one that lies in {list(shard.shape)}")
    return shard


def check_shards(shards: Sequence[DenseShard], *, name: str) -> None:
    """Check that pieces make up the whole tensor.

    Raises:
        MalformedObject: the pieces leave a gap, overlap without being the same piece, or differ in
            shape or dtype.
    """
    _checked(shards, name)


def join_shards(shards: Sequence[DenseShard], *, name: str) -> Tensor:
    """Return the whole tensor, in fresh CPU memory.

    Raises:
        MalformedObject: as `check_shards`; checked before anything is allocated.
    """
    filled = _checked(shards, name)
    whole = torch.empty(shards[0].shape, dtype=shards[0].tensor.dtype, device="cpu")
    _copy(filled, (0,) * whole.dim(), whole)
    return whole


def fill_part(shards: Sequence[DenseShard], at: Sequence[int], into: Tensor, *, name: str) -> None:
    """Copy the part of the whole tensor that begins at `at` into `into`, from any sharding.

    Args:
        shards: the pieces of all ranks, or of the ranks that hold some of the part.
        at: index of the part's first element in the whole tensor.
        into: receives the part; its shape is the part's; of any strides and on any device.
        name: name of the tensor, for errors.

    Raises:
        MalformedObject: the pieces leave a gap in the part, overlap, or differ in shape or dtype.
        ValueError: the part does not lie within the tensor, or has another dtype.
    """
    filled = _disjoint(shards, name)
    shape, dtype = shards[0].shape, shards[0].tensor.dtype
    is_inside = len(at) == into.dim() == len(shape) and all(
        0 <= part.start and part.stop <= size
        for part, size in zip(_box(at, into), shape, strict=True)
    )
    if not is_inside or into.dtype != dtype:
        piece_text = f"{into.dtype} {list(into.shape)} at {list(at)}"
        raise ValueError(f"{name!r}: {piece_text} is no part of {dtype} {list(shape)}")
    stored, needed = _elements_in(filled, _box(at, into)), into.numel()
    if stored != needed:  # the pieces are disjoint, so equal counts mean that there is no gap
        piece_text = f"{stored} elements of {list(into.shape)} at {list(at)}"
        raise _malformed(name, piece_text, f"{needed}, without a gap")
    _copy(filled, at, into)


def has_part(shards: Sequence[DenseShard], box: Sequence[range], *, name: str) -> bool:
    """Tell whether every element of a part is in one of the pieces.

    Args:
        shards: pieces of the tensor.
        box: the part, a range along each dimension.
        name: name of the tensor, for errors.

    Raises:
        MalformedObject: the pieces overlap, or differ in shape or dtype.
    """
    return _elements_in(_disjoint(shards, name), box) == math.prod(map(len, box))


def fault_of_boxes(shape: Sequence[int], boxes: Iterable[Sequence[range]]) -> str | None:
    """Return why boxes do not make up a tensor with each element in one box; None if they do.

    Args:
        shape: shape of the tensor.
        boxes: each a range of indices along each dimension; empty boxes are ignored.
    """
    filled = sorted((tuple(box) for box in boxes if all(box)), key=_starts)
    overlap = _overlap(filled)
    if overlap is not None:
        return overlap
    stored, needed = sum(math.prod(map(len, box)) for box in filled), math.prod(shape)
    return None if stored == needed else f"{stored} elements of {needed} in all pieces"


def dense_shards(state: Mapping[int, object]) -> dict[str, list[DenseShard]]:
    """Return the pieces of all ranks of the parameters and buffers stored in pieces, by name.

    Raises:
        MalformedObject: a piece does not parse, or a tensor is stored both whole and in pieces.
    """
    pieces: dict[str, list[DenseShard]] = {}
    whole: set[str] = set()
    for tree in state.values():
        model = tree.get("model") if isinstance(tree, Mapping) else None
        dense = model.get("tensors") if isinstance(model, Mapping) else None
        for name, value in dense.items() if isinstance(dense, Mapping) else ():
            if is_shard(value):
                pieces.setdefault(str(name), []).append(parse_shard(value, name=str(name)))
            else:
                whole.add(str(name))
    for name in sorted(whole & pieces.keys()):
        raise _malformed(name, "the whole tensor beside a piece", "the whole tensor, or pieces")
    return pieces


def _checked(shards: Sequence[DenseShard], name: str) -> list[DenseShard]:
    """Return the pieces with elements, in order; check that they are the whole tensor."""
    filled = _disjoint(shards, name)
    stored, needed = sum(shard.tensor.numel() for shard in filled), math.prod(shards[0].shape)
    if stored != needed:
        raise _malformed(name, f"{stored} elements in all pieces", f"{needed}, without a gap")
    return filled


def _disjoint(shards: Sequence[DenseShard], name: str) -> list[DenseShard]:
    """Return the pieces with elements, in order; check that they are disjoint, of one tensor."""
    if not shards:
        raise _malformed(name, "no piece", "pieces that make up the tensor")
    forms = {(shard.shape, shard.tensor.dtype) for shard in shards}
    if len(forms) > 1:
        forms_text = ", ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype in forms))
        raise _malformed(
            name, f"pieces of {forms_text:.200}", "the same shape and dtype in all pieces"
        )
    filled = _each_once([shard for shard in shards if shard.tensor.numel()], name)
    overlap = _overlap([shard.box for shard in filled])
    if overlap is not None:
        raise _malformed(name, overlap, "each element in one piece")
    return filled


def _each_once(shards: Sequence[DenseShard], name: str) -> list[DenseShard]:
    """Return the pieces in order; of pieces of the same place (replicas) only the first.

    Raises:
        MalformedObject: two pieces of the same place differ.
    """
    by_box: dict[tuple[range, ...], DenseShard] = {}
    for shard in shards:
        first = by_box.setdefault(shard.box, shard)
        if first is not shard and not torch.equal(_bits(first.tensor), _bits(shard.tensor)):
            pieces_text = (
                f"two pieces of {list(shard.tensor.shape)} at {list(shard.at)} that differ"
            )
            raise _malformed(name, pieces_text, "the same bits in all pieces of one place")
    return [by_box[box] for box in sorted(by_box, key=_starts)]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes, so that -0 differs from 0, and a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _overlap(boxes: Sequence[tuple[range, ...]]) -> str | None:
    """Return which two boxes overlap, as text, or None; they are sorted and not empty."""
    for index, box in enumerate(boxes):
        for next_box in boxes[index + 1 :]:
            if box and next_box[0].start >= box[0].stop:
                break  # the boxes are sorted: all later ones begin at or after the end, too
            if all(_common(a, b) for a, b in zip(box, next_box, strict=True)):
                return f"pieces at {list(_starts(box))} and {list(_starts(next_box))} that overlap"
    return None


def _starts(box: Sequence[range]) -> tuple[int, ...]:
    return tuple(part.start for part in box)


def _elements_in(shards: Sequence[DenseShard], box: Sequence[range]) -> int:
    """Return how many elements of the part `box` disjoint pieces hold."""
    return sum(
        math.prod(len(_common(a, b)) for a, b in zip(shard.box, box, strict=True))
        for shard in shards
    )


def _copy(shards: Sequence[DenseShard], offsets: Sequence[int], target: Tensor) -> None:
    target_box = _box(offsets, target)
    with torch.no_grad():
        for shard in shards:
            common = [_common(a, b) for a, b in zip(shard.box, target_box, strict=True)]
            if not all(common):
                continue
            source = tuple(
                slice(c.start - a, c.stop - a) for c, a in zip(common, shard.at, strict=True)
            )
            dest = tuple(
                slice(c.start - a, c.stop - a) for c, a in zip(common, offsets, strict=True)
            )
            target[dest].copy_(shard.tensor[source])


def _box(offsets: Sequence[int], tensor: Tensor) -> tuple[range, ...]:
    return tuple(range(a, a + n) for a, n in zip(offsets, tensor.shape, strict=False))


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _are_sizes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        type(size) is int and 0 <= size <= _MOST for size in value
    )


def _malformed(name: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(
        f"dense tensor {name!r:.200}",
        found=found,
        expected=expected,
        next_step="restore an older checkpoint: recpoint list URL",
    )

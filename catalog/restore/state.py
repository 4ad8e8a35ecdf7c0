"""Reads the ranks' state trees from chunks, and removes wrappers from the names of parameters.

Names parameters, buffers and modules independently of the model's wrappers. The names are those of
torch's `get_model_state_dict`, so that a checkpoint of a model under DDP, FSDP or `torch.compile`
restores into the bare model, and the other way round.

Reads the state trees of all ranks, or of those that a reader needs. A chunk is read whole or not at
all, and checked before it is parsed (format §6.3, read order, rule 5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recpoint.catalog.restore.chunks import ChunkSource, read_chunk
from recpoint.catalog.restore.dense import check_shards, dense_shards
from recpoint.catalog.restore.target import RestoreTarget, StateChoosingTarget
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import MalformedObject
from recpoint.format.chunk import Section, section_tensor
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.state_values import unflatten, unflatten_keys

__all__ = ["StateReading", "canonical_name", "read_state"]


#: Attributes under which wrappers keep the wrapped module: torch.compile, FSDP, activation
#: checkpointing, and TorchRec's DistributedModelParallel.
_WRAPPED = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_dmp_wrapped_module")
)
_MAY_WRAP = _WRAPPED | {"module"}


def canonical_name(model: nn.Module, name: str) -> str:
    """Return a name without the parts that wrappers have added.

    Args:
        model: the model, wrapped or not.
        name: full name of a module, parameter or buffer in `model`.
    """
    parts = name.split(".")
    if _MAY_WRAP.isdisjoint(parts):
        return name  # the usual case; this is called for each module in a stall
    parts_kept = []
    module: object = model
    for part in parts:
        wrapper = part in _WRAPPED or (
            part == "module" and isinstance(module, DistributedDataParallel)
        )
        if not wrapper:
            parts_kept.append(part)
        submodule = module._modules.get(part) if isinstance(module, nn.Module) else None
        if submodule is None:
            # A parameter, a buffer, or an attribute that a wrapper forwards to its module.
            submodule = getattr(module, part, None)
        module = submodule
    return ".".join(parts_kept)


_NEXT_STEP = "recpoint check URL --level full, and restore an older checkpoint"
_TENSOR: Final = re.compile(r"tensor\.(0|[1-9][0-9]{0,8})(?:\.(0|[1-9][0-9]{0,8}))?\Z")


def read_state(
    source: ChunkSource,
    manifest: Manifest,
    reads: ReadScheduler,
    on_chunk: Callable[[ChunkEntry], None],
) -> dict[int, object]:
    """Return the state tree of every rank, in new memory.

    Arguments are those of `StateReading`.

    Raises:
        FormatError: a chunk is damaged, a rank's chunks do not make one tree, or the ranks' pieces
            of a tensor do not make it up.
        ObjectNotFound: a chunk is missing.
        StoreError: a chunk could not be read.
    """
    reading = StateReading(source, manifest, reads, on_chunk)
    return _checked(reading.whole(range(manifest.ranks)))


class StateReading:
    """Reads state trees of one checkpoint.

    Args:
        source: where chunks are read from.
        manifest: manifest of the checkpoint.
        reads: runs the reads.
        on_chunk: called for each chunk after it was read.
        on_wanted: called with the bytes of the chunks to read, before they are read.
    """

    def __init__(
        self,
        source: ChunkSource,
        manifest: Manifest,
        reads: ReadScheduler,
        on_chunk: Callable[[ChunkEntry], None],
        on_wanted: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._source, self._manifest, self._reads = source, manifest, reads
        self._on_chunk, self._on_wanted = on_chunk, on_wanted
        self._entries: dict[int, list[ChunkEntry]] = {rank: [] for rank in range(manifest.ranks)}
        for entry in sorted(manifest.chunks, key=lambda entry: entry.key):
            if entry.content == "state":
                self._entries[entry.rank].append(entry)

    def for_target(self, target: RestoreTarget) -> dict[int, object]:
        """Return the trees that a target needs: all trees, unless the target chooses.

        Raises:
            FormatError, ObjectNotFound, StoreError: as `read_state`.
        """
        if not isinstance(target, StateChoosingTarget):
            return _checked(self.whole(self._entries))
        trees: dict[int, object] = {}
        whole: set[int] = set()
        brief: set[int] = set()
        while True:
            state_wanted = target.state_wanted(self._manifest, trees)
            more = set(state_wanted.whole) - whole
            briefly = set(state_wanted.briefly) - whole - more - brief
            if not more and not briefly:
                return _checked(trees) if len(whole) == len(self._entries) else trees
            trees |= self.whole(sorted(more)) | self.briefly(sorted(briefly), state_wanted.keys)
            whole |= more
            brief |= briefly

    def whole(self, ranks: Collection[int]) -> dict[int, object]:
        """Return the whole trees of these ranks."""
        sections: dict[int, dict[str, Section]] = {rank: {} for rank in ranks}
        self._read([entry for rank in ranks for entry in self._entries[rank]], sections)
        return {
            rank: self._assemble(rank, rank_sections) for rank, rank_sections in sections.items()
        }

    def briefly(self, ranks: Collection[int], keys: Collection[str]) -> dict[int, object]:
        """Return the entries `keys` of the trees of these ranks; reads as little else as possible.

        A rank's first chunk has its tree and the first of its tensors (format §3.4). The other
        chunks are read only if a needed tensor is not in the first.
        """
        sections: dict[int, dict[str, Section]] = {rank: {} for rank in ranks}
        self._read([entry for rank in ranks for entry in self._entries[rank][:1]], sections)
        parts: dict[int, object] = {}
        for rank, first in sections.items():
            part = self._some(rank, first, keys)
            if part is None:
                self._read(self._entries[rank][1:], sections)
                part = self._assemble(rank, first)
            parts[rank] = part
        return parts

    def _read(
        self, entries: Collection[ChunkEntry], sections: Mapping[int, dict[str, Section]]
    ) -> None:
        self._on_wanted(sum(entry.bytes for entry in entries))
        chunks = self._reads.in_order(
            entries, lambda entry: read_chunk(self._source, self._manifest, entry)
        )
        for entry, outcome in chunks:
            chunk = outcome.result()
            of_rank = sections[entry.rank]
            twice = of_rank.keys() & chunk.sections.keys()
            if twice:
                raise _malformed(entry.key, f"{min(twice)} again", "each part of the state once")
            of_rank.update(chunk.sections)
            self._on_chunk(entry)

    def _some(
        self, rank: int, sections: Mapping[str, Section], keys: Collection[str]
    ) -> object | None:
        """Return the entries `keys` of a tree; None if the sections lack some of their tensors."""
        if "tree" not in sections:
            return None
        whole: dict[int, Tensor] = {}
        for name, section in sections.items():
            match = _TENSOR.match(name)
            if match is not None and match[2] is None:
                whole[int(match[1])] = section_tensor(section)
        tree = bytes(sections["tree"].data)
        return unflatten_keys(tree, whole, keys, name=self._name(rank))

    def _assemble(self, rank: int, sections: Mapping[str, Section]) -> object:
        """Return one rank's state tree from the sections of all its state chunks (format §3.4)."""
        key = self._name(rank)
        if "tree" not in sections:
            raise _malformed(key, "no tree", "one tree")
        whole: dict[int, Tensor] = {}
        pieces: dict[int, dict[int, Tensor]] = {}
        for name, section in sections.items():
            if name == "tree":
                continue
            match = _TENSOR.match(name)
            if match is None:
                tensor_text = f"the tensor {name!r:.80}"
                raise _malformed(key, tensor_text, "tensor.<i> or tensor.<i>.<piece>")
            if match[2] is None:
                whole[int(match[1])] = section_tensor(section)
            else:
                pieces.setdefault(int(match[1]), {})[int(match[2])] = section_tensor(section)
        for number, parts in pieces.items():
            if number in whole or sorted(parts) != list(range(len(parts))):
                raise _malformed(key, f"tensor {number} with pieces missing", "each piece once")
            ordered = [parts[piece] for piece in range(len(parts))]
            if any(part.dim() != 1 or part.dtype != ordered[0].dtype for part in ordered):
                tensor_text = f"tensor {number} in pieces that do not fit"
                raise _malformed(key, tensor_text, "1-D pieces of one dtype")
            whole[number] = torch.cat(ordered)
        if sorted(whole) != list(range(len(whole))):
            tensor_text = f"the tensors {sorted(whole)!r:.80}"
            raise _malformed(key, tensor_text, "numbers from 0 without a gap")
        tensors = [whole[number] for number in range(len(whole))]
        return unflatten(bytes(sections["tree"].data), tensors, name=key)

    def _name(self, rank: int) -> str:
        return f"{Representation.of(self._manifest).key}, state of rank {rank}"


def _checked(state: dict[int, object]) -> dict[int, object]:
    """Check that the pieces in the trees of all ranks make up whole tensors; return the trees."""
    for name, shards in dense_shards(state).items():
        check_shards(shards, name=name)
    return state


def _malformed(key: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(key, found=found, expected=expected, next_step=_NEXT_STEP)

"""Embedding modules that are looked up by keys: what a model has in place of torch's own."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.keyed.admission import Admission
from recpoint.embeddings.keyed.eviction import Eviction
from recpoint.embeddings.keyed.keyed_module import KeyedModule
from recpoint.errors import SettingsError

__all__ = ["KeyedEmbedding", "KeyedEmbeddingBag"]


class _PassedOn(TypedDict, total=False):
    """Types of the settings that `KeyedModule` gets from another signature than its own."""

    initial: Initial
    admit: Admission | None
    evict: Eviction | None
    sparse: bool
    name: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class KeyedEmbedding(KeyedModule):
    """An embedding that is looked up by keys, which are any int64, with rows for some of them.

        users = KeyedEmbedding(64, 50_000_000, initial=Uniform(seed=0), evict=LeastRecent())
        out = users(ids)  # as nn.Embedding, with ids of any value

    A lookup in training (the module is in training mode, its weight requires gradients, and these
    are enabled) gives rows to new keys. If no row is free, rows leave that no lookup has used since
    the last optimizer step, in the order of `evict`. Their keys begin anew if they come back. Any
    other lookup changes nothing and gives the weight no gradient. Keys without a row look up zeros,
    which no training changes.

    Which keys have rows follows from the lookups and the optimizer steps alone. The optimizer is
    one of torch that keeps its state by row; a row begins with the optimizer's first entries. The
    weight, [capacity_rows + 1, dim], holds rows by slot, and row 0 for keys that have none. No
    lookup has a max_norm, which would change rows without a step.

    Args:
        dim: values in a row.
        capacity_rows: number of keys that can have rows at the same time.
        initial: computes the first values of a key's row. Equal keys, names and settings always
            give equal values.
        admit: which keys get rows: `Seen`, `Probability`; None: each key.
        evict: which rows leave first: `LeastRecent`, `LeastUsed`; None: `LeastRecent()`.
        sparse: whether gradients are sparse.
        name: what `initial` gets as the name of the table. Tables with equal names, rules and keys
            begin with equal values.
        device: of the weight. The keys are on the CPU. "meta" takes no memory: the rows are in a
            cache and at home (`recpoint.embeddings.cached`).
        dtype: of the weight.

    Raises:
        SettingsError: a setting cannot work.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of keys: [*, dim].

        Args:
            input: int64 or int32 keys of any shape.

        Raises:
            SettingsError: see `KeySlots.take`; or the caller cannot train such a table.
        """
        places, weight, padding = self._lookup_rows(input)
        return functional.embedding(places, weight, padding_idx=padding, sparse=self.sparse)

    def to_table(self, vocabulary: Tensor) -> nn.Embedding:
        """Return a plain embedding whose row i is that of key `vocabulary[i]`, on the same device.

        Args:
            vocabulary: int64 or int32 [n]. Keys without a row get zeros, as in a lookup.
        """
        rows = self._rows_of(vocabulary)
        return nn.Embedding(len(rows), self.dim, sparse=self.sparse, _weight=rows)


class KeyedEmbeddingBag(KeyedModule):
    """Sums, means or maxima of bags of keys; see `KeyedEmbedding`, and `torch.nn.EmbeddingBag`.

    Keys without a row are left out of a bag, as torch leaves out its padding row: a mean is that of
    the keys with rows.

    Args:
        dim: see `KeyedEmbedding`.
        capacity_rows: see `KeyedEmbedding`.
        mode: "sum", "mean" or "max".
        include_last_offset: whether `offsets` ends with the number of keys.
        settings: all others of `KeyedEmbedding`.

    Raises:
        SettingsError: a setting cannot work.
    """

    def __init__(
        self,
        dim: int,
        capacity_rows: int,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **settings: Unpack[_PassedOn],
    ) -> None:
        is_sparse = settings.get("sparse", False)
        if mode not in ("sum", "mean", "max") or (mode == "max" and is_sparse):
            raise SettingsError(
                "KeyedEmbeddingBag(mode=...)",
                found=f"{mode!r:.200} with sparse={is_sparse}",
                expected="'sum', 'mean' or 'max'; 'max' without sparse gradients",
                next_step="give another mode",
            )
        super().__init__(dim, capacity_rows, **settings)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return a row for each bag: [bags, dim].

        Args:
            input: int64 or int32 keys: [bags, keys of a bag], or [n] with offsets.
            offsets: where each bag begins in `input`.
            per_sample_weights: weights of the keys, of the shape of `input`; with mode "sum" only.

        Raises:
            SettingsError: see `KeySlots.take`; or the caller cannot train such a table.
        """
        rows = self._lookup_rows(input)
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            if not rows.weight.requires_grad:
                # The gradient of the weights is computed from rows, which may have left by then.
                rows = rows.copied()
        places, weight, padding = rows
        return functional.embedding_bag(
            places,
            weight,
            None if offsets is None else offsets.long(),
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def to_table(self, vocabulary: Tensor) -> nn.EmbeddingBag:
        """Return a plain module whose row i is that of key `vocabulary[i]`, on the same device.

        Args:
            vocabulary: int64 or int32 [n]. Keys without a row get zeros, which count in means.
        """
        rows = self._rows_of(vocabulary)
        return nn.EmbeddingBag(
            len(rows),
            self.dim,
            mode=self.mode,
            sparse=self.sparse,
            include_last_offset=self.include_last_offset,
            _weight=rows,
        )

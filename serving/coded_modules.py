"""Lookups of a model in tables that are kept as codes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recpoint.errors import IncompatibleModel
from recpoint.serving.tables import ServedTable

__all__ = ["CodedBag", "CodedEmbedding", "coded_lookups", "replace_lookups"]


class CodedEmbedding(nn.Module):
    """`nn.Embedding` whose rows come from a served table."""

    def __init__(self) -> None:
        super().__init__()
        self.table: ServedTable | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., dim] of ids [...]."""
        return _table(self.table).lookup(ids)


class CodedBag(nn.Module):
    """`nn.EmbeddingBag` whose rows come from a served table; each row is decoded once a call."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.table: ServedTable | None = None
        self._mode, self._last = bag.mode, bag.include_last_offset
        self._padding = bag.padding_idx

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As `nn.EmbeddingBag.forward`."""
        unique, places = ids.unique(return_inverse=True)
        padding = None
        if self._padding is not None:
            found = (unique == self._padding).nonzero()
            padding = int(found[0]) if found.numel() else None
        return F.embedding_bag(
            places,
            _table(self.table).lookup(unique),
            offsets,
            mode=self._mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self._last,
            padding_idx=padding,
        )


def replace_lookups(model: nn.Module) -> None:
    """Replace every embedding of `model`; its weights are let go.

    Raises:
        IncompatibleModel: the model is itself an embedding, or one of them renormalizes its rows.
    """
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if not name or module.max_norm is not None:
            raise IncompatibleModel(
                f"table {name or 'weight'!r}",
                found="the model itself is it" if not name else "max_norm, which writes to rows",
                expected="embeddings inside a model, without max_norm",
                next_step="follow without quantized=True",
            )
        coded = CodedEmbedding() if isinstance(module, nn.Embedding) else CodedBag(module)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent) if parent else model, last, coded)


def _table(table: ServedTable | None) -> ServedTable:
    if table is None:
        raise RuntimeError("no version has been applied to this model yet")
    return table


def coded_lookups(model: nn.Module) -> dict[str, CodedEmbedding | CodedBag]:
    """Those of a model by table name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CodedEmbedding | CodedBag)
    }

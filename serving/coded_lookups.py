"""Replaces a model's embeddings by lookups of codes, which serve rows as they are stored."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recpoint.catalog.restore.state import canonical_name
from recpoint.errors import IncompatibleModel
from recpoint.serving.tables import ServedTable

__all__ = ["CodedBag", "CodedEmbedding", "coded_lookups", "replace_lookups"]


class CodedEmbedding(nn.Module):
    """`nn.Embedding` whose rows come from a served table."""

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__()
        self.table: ServedTable | None = None
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim

    # Arguments keep torch's names, because a model may pass them by keyword.
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Rows [..., dim] of ids [...]."""
        return _table(self.table).lookup(input)


class CodedBag(nn.Module):
    """`nn.EmbeddingBag` whose rows come from a served table; each row is decoded once a call."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.table: ServedTable | None = None
        self._mode, self._last = bag.mode, bag.include_last_offset
        self._padding = bag.padding_idx
        self.num_embeddings, self.embedding_dim = bag.num_embeddings, bag.embedding_dim

    def forward(
        self,
        input: Tensor,  # noqa: A002
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As `nn.EmbeddingBag.forward`."""
        unique, places = input.unique(return_inverse=True)
        padding = None
        if self._padding is not None:
            padding_places = (unique == self._padding).nonzero()
            padding = int(padding_places[0]) if padding_places.numel() else None
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
    """Replace every embedding of `model`, and release the embedding's weights.

    Raises:
        IncompatibleModel: the model is itself an embedding, or one of its embeddings does more than
            look rows up. Nothing is replaced.
    """
    replacements: dict[nn.Module, CodedEmbedding | CodedBag] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check(name, module)
            if isinstance(module, nn.EmbeddingBag):
                replacements[module] = CodedBag(module)
            else:
                replacements[module] = CodedEmbedding(module)
    # Each embedding is replaced under all its names.
    for parent in list(model.modules()):
        for name, module in parent._modules.items():
            if module is not None and module in replacements:
                setattr(parent, name, replacements[module])


def _check(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse an embedding for which a lookup of codes would serve other values."""
    reason: str | None = None
    if not name:
        reason = "the model itself is it"
    elif module.max_norm is not None:
        reason = "max_norm, which writes to rows"
    elif type(module).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        reason = f"a {type(module).__name__} with a forward of its own"
    elif module._forward_hooks or not all(
        getattr(hook, "reads_only", False) for hook in module._forward_pre_hooks.values()
    ):
        reason = "forward hooks"
    if reason is not None:
        raise IncompatibleModel(
            f"table {name or 'weight'!r}",
            found=reason,
            expected="embeddings inside a model that only look rows up, without max_norm",
            next_step="follow without quantized=True",
        )


def _table(table: ServedTable | None) -> ServedTable:
    if table is None:
        raise RuntimeError("no version has been applied to this model yet")
    return table


def coded_lookups(model: nn.Module) -> dict[str, CodedEmbedding | CodedBag]:
    """Return the lookups of codes in a model, by table name."""
    return {
        canonical_name(model, name): module
        for name, module in model.named_modules()
        if isinstance(module, CodedEmbedding | CodedBag)
    }

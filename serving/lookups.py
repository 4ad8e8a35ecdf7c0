"""Replaces a model's embeddings by lookups in served tables: of codes, and of rows by key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
from recpoint.errors import IncompatibleModel
from recpoint.serving.keyed_table import RowsByKey, ServedTable
from recpoint.serving.tables import FloatTable

__all__ = [
    "ByKey",
    "CodedBag",
    "CodedEmbedding",
    "KeyedBagLookup",
    "KeyedLookup",
    "TableLookup",
    "replace_lookups",
    "table_lookups",
]

#: `ByKey.find_slots`, which a compiled model calls between two graphs.
_outside_graphs: list[Callable[[Any, Tensor], Tensor]] = []

_Plain = nn.Embedding | nn.EmbeddingBag
_Keyed = KeyedEmbedding | KeyedEmbeddingBag


class TableLookup(nn.Module):
    """A module whose rows come from a served table; a copy of it has none yet."""

    def __init__(self) -> None:
        super().__init__()
        self.table: ServedTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Two copies of a model have tables of their own, and a map of keys cannot be copied.
        return {**self.__dict__, "table": None}

    @property
    def served(self) -> ServedTable:
        """The table.

        Raises:
            RuntimeError: there is none yet.
        """
        if self.table is None:
            raise RuntimeError("no version has been applied to this model yet")
        return self.table


class CodedEmbedding(TableLookup):
    """`nn.Embedding` whose rows come from a served table."""

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim

    # Arguments keep torch's names, because a model may pass them by keyword.
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Rows [..., dim] of ids [...]."""
        return self.served.lookup(input)


class CodedBag(TableLookup):
    """`nn.EmbeddingBag` whose rows come from a served table; each row is decoded once a call."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
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
        places, rows, padding = _decoded_once(self.served, input, self._padding)
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self._mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self._last,
            padding_idx=padding,
        )


class ByKey(TableLookup):
    """What lookups by key show of their table.

    Args:
        module: whose place it takes.

    Attributes:
        dim: values of a row.
        dtype: of the values.
        device: where decoded rows are.
    """

    def __init__(self, module: _Keyed) -> None:
        super().__init__()
        weight = module.weight
        self.dim, self.dtype = module.dim, weight.dtype
        # A trainer may have built it without memory, for rows in a cache.
        self.device = torch.device("cpu") if weight.is_meta else weight.device
        if not _outside_graphs:
            _outside_graphs.append(torch.compiler.disable(ByKey.find_slots))

    @property
    def keyed(self) -> RowsByKey:
        """The table."""
        table = self.served
        assert isinstance(table, RowsByKey)  # `ServedModel.check_tables` has seen to it
        return table

    def has_row(self, keys: Tensor) -> Tensor:
        """Return whether each key has a row: bool, of the shape of `keys`."""
        return self.find_slots(keys) > 0

    def find_slots(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, or 0; see `RowsByKey.slots_of`."""
        if torch.compiler.is_compiling():
            return _outside_graphs[0](self, keys)
        return self.keyed.slots_of(keys)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look keys up."""


class KeyedLookup(ByKey):
    """`KeyedEmbedding` whose rows and keys are those of a served table."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Rows [..., dim] of keys [...]; row 0, which is zeros, of a key that has none."""
        return self.keyed.rows_at(self.find_slots(input))


class KeyedBagLookup(ByKey):
    """`KeyedEmbeddingBag` whose rows and keys are those of a served table."""

    def __init__(self, module: KeyedEmbeddingBag) -> None:
        super().__init__(module)
        self.mode, self.include_last_offset = module.mode, module.include_last_offset

    def forward(
        self,
        input: Tensor,  # noqa: A002
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As `KeyedEmbeddingBag.forward`: keys that have no row are left out."""
        table = self.keyed
        slots = self.find_slots(input)
        padding: int | None = 0
        if isinstance(table.by_slot, FloatTable):
            places, rows = slots.to(table.by_slot.values.device), table.by_slot.values
        else:
            places, rows, padding = _decoded_once(table.by_slot, slots, 0)
        return F.embedding_bag(
            places,
            rows,
            None if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def _decoded_once(
    table: ServedTable, ids: Tensor, padding_id: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """Return the places of ids in the rows looked up, these rows, and the place of the padding."""
    unique_ids, places = ids.unique(return_inverse=True)
    padding = None
    if padding_id is not None:
        padding_places = (unique_ids == padding_id).nonzero()
        padding = int(padding_places[0]) if padding_places.numel() else None
    return places, table.lookup(unique_ids), padding


def replace_lookups(model: nn.Module, *, coded: bool) -> None:
    """Replace keyed embeddings of `model`, and release their weights.

    Args:
        model: a model as the trainer builds it.
        coded: replace plain embeddings, too, by lookups of codes.

    Raises:
        IncompatibleModel: the model is itself such an embedding, or one of them does more than look
            rows up. Nothing is replaced.
    """
    replacements: dict[nn.Module, TableLookup] = {}
    for name, module in model.named_modules():
        if isinstance(module, _Keyed) or (coded and isinstance(module, _Plain)):
            _check(name, module)
            replacements[module] = _lookup_of(module)
    # Each embedding is replaced under all its names.
    for parent in list(model.modules()):
        for name, module in parent._modules.items():
            if module is not None and module in replacements:
                setattr(parent, name, replacements[module])


def _lookup_of(module: _Plain | _Keyed) -> TableLookup:
    if isinstance(module, KeyedEmbeddingBag):
        return KeyedBagLookup(module)
    if isinstance(module, KeyedEmbedding):
        return KeyedLookup(module)
    return CodedBag(module) if isinstance(module, nn.EmbeddingBag) else CodedEmbedding(module)


def _check(name: str, module: _Plain | _Keyed) -> None:
    """Refuse an embedding for which a lookup in a served table would give other values."""
    reason: str | None = None
    forwards = [kind.forward for kind in (*_Plain.__args__, *_Keyed.__args__)]
    if not name:
        reason = "the model itself is it"
    elif isinstance(module, _Plain) and module.max_norm is not None:
        reason = "max_norm, which writes to rows"
    elif type(module).forward not in forwards:
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
            next_step="follow without quantized=True"
            if isinstance(module, _Plain)
            else "follow without a model, and look keys up in the version's tables",
        )


def table_lookups(model: nn.Module) -> dict[str, TableLookup]:
    """Return the lookups in served tables that a model has, by table name."""
    return {
        canonical_name(model, name): module
        for name, module in model.named_modules()
        if isinstance(module, TableLookup)
    }

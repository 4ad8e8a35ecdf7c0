"""Does one lookup of FBGEMM, which has rows of several tables in one tensor, in small tables.

FBGEMM puts the tables of one module, a TBE, into one tensor, and looks up all features of a batch
in one operation. These of its arguments say what is looked up, in whichever order a version of
FBGEMM has them:

    one of them         the values of all tables, one after the other
    weights_offsets     of each feature: where its table begins, in values
    D_offsets, or D     the length of the feature's rows
    hash_size_cumsum    of each feature: the rows of all tables before its own; then those of all
    indices, offsets    ids within the feature's table; where each bag begins, feature by feature
    B_offsets           the first bag of each feature, and the end of all; absent or empty: all
                        features have equally many
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from recpoint.trainer_plugin.loss.lookups import SmallTables

__all__ = ["BatchedLookup"]

_NEEDED: Final = ("weights_offsets", "hash_size_cumsum", "indices", "offsets")
_BAGS: Final = "B_offsets"
#: Other arguments of lookups in which features have different numbers of bags begin so.
_VARIABLE: Final = "vbe_"


class _FeatureIds(NamedTuple):
    """What one feature of a batch looks up.

    Attributes:
        first_value: position of its table's first value in the tensor of all tables.
        dim: values of a row.
        ids: int32 or int64 [n], within the table.
    """

    first_value: int
    dim: int
    ids: Tensor


class BatchedLookup(NamedTuple):
    """A lookup in the tables of one TBE.

    Attributes:
        operation: the operation of FBGEMM.
        call: name of each argument -> its value.
        weights: name of the argument that has the values of all tables.
        tables: position of a table's first value in it -> index of the watched table.
        features: what each feature looks up, in order.
    """

    operation: Any
    call: dict[str, Any]
    weights: str
    tables: Mapping[int, int]
    features: tuple[_FeatureIds, ...]

    @classmethod
    def of(
        cls,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        weights: Tensor,
        tables: Mapping[int, int],
    ) -> Self | None:
        """Return the operation as a lookup; None: it is another use of the tables.

        Args:
            operation, arguments, keywords: as torch calls it.
            weights: the argument that has the values of all tables.
            tables: position of a table's first value in the memory of these values -> index of the
                watched table.
        """
        names = [argument.name for argument in operation._schema.arguments]
        call = dict(zip(names, arguments, strict=False)) | keywords
        has_all = all(isinstance(call.get(name), Tensor) for name in _NEEDED)
        if operation.namespace != "fbgemm" or not has_all or weights.dim() != 1:
            return None
        bags = call[_BAGS] if _is_given(call.get(_BAGS)) else None
        is_variable = any(name.startswith(_VARIABLE) and _is_given(call[name]) for name in call)
        if is_variable and bags is None:
            return None
        (name,) = (name for name, value in call.items() if value is weights)
        first_values = call["weights_offsets"].tolist()
        if "D_offsets" in call:
            dims = call["D_offsets"].diff().tolist()
        else:
            dims = [int(call["D"])] * len(first_values)
        ids = _ids_of_features(call["indices"], call["offsets"], len(first_values), bags)
        first_place = int(weights.storage_offset())
        own_tables = {place - first_place: table for place, table in tables.items()}
        features = map(_FeatureIds, first_values, dims, ids)
        return cls(operation, call, name, own_tables, tuple(features))

    @property
    def ids(self) -> Iterable[tuple[int, Tensor]]:
        """Watched tables and the ids that each feature looks up."""
        return [
            (self.tables[feature.first_value], feature.ids)
            for feature in self.features
            if feature.first_value in self.tables
        ]

    def run(self) -> Any:
        """Do the lookup."""
        return self.operation(**self.call)

    def run_in(self, tables: SmallTables) -> Any:
        """Do the lookup in small tables; rows of tables that are not watched stay as they are."""
        weights = self.call[self.weights]
        first_values: dict[int, int] = {}  # of a table -> in the small tables
        first_rows: dict[int, int] = {}
        blocks: list[Tensor] = []
        values = rows = 0
        positions = []
        for first_value, dim, ids in self.features:
            table = self.tables.get(first_value)
            if table is None:
                own_ids = self._looked_up(first_value)
                places = first_value + own_ids.unsqueeze(1) * dim + torch.arange(dim, device="cpu")
                block = weights.detach()[places]
                positions.append(torch.searchsorted(own_ids, ids.to(torch.int64).contiguous()))
            else:
                block = tables.rows(table)
                positions.append(tables.positions(table, ids))
            if first_value in first_values:
                continue
            if not len(block):  # FBGEMM takes a table without rows for another feature of the next
                block = weights.new_zeros((1, dim))
            first_values[first_value], first_rows[first_value] = values, rows
            blocks.append(block.reshape(-1))
            values, rows = values + block.numel(), rows + len(block)
        call, indices = dict(self.call), self.call["indices"]
        call[self.weights] = torch.cat(blocks)
        call["weights_offsets"] = call["weights_offsets"].new_tensor(
            [first_values[feature.first_value] for feature in self.features]
        )
        call["hash_size_cumsum"] = call["hash_size_cumsum"].new_tensor(
            [*(first_rows[feature.first_value] for feature in self.features), rows]
        )
        call["indices"] = torch.cat(positions).to(indices.dtype)
        return self.operation(**call)

    def _looked_up(self, first_value: int) -> Tensor:
        """Return the ids that all features look up in one table: int64, ascending, each once."""
        ids = [feature.ids for feature in self.features if feature.first_value == first_value]
        unique_ids: Tensor = torch.cat(ids).to(torch.int64).unique()
        return unique_ids


def _ids_of_features(
    indices: Tensor, offsets: Tensor, features: int, bags: Tensor | None
) -> list[Tensor]:
    """Return the ids of each feature.

    Args:
        indices: ids, feature by feature.
        offsets: where each bag begins; then where the last one ends.
        features: number of features.
        bags: `B_offsets`; None: all features have equally many bags.
    """
    if bags is None:
        bags = torch.arange(features + 1, device="cpu") * ((offsets.numel() - 1) // features)
    ends = offsets[bags.to(torch.int64)].tolist()
    return [indices[first:end] for first, end in pairwise(ends)]


def _is_given(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0

"""Lookups of FBGEMM in small tables give what tables give in which the rows are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.loss.lookups import SmallTables
from recpoint.trainer_plugin.loss.table_watch import (
    RecordedIds,
    ReplacedRows,
    TableWatch,
    WatchedTable,
)
from tests.torchrec_model import MISSING

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),
]

DIMS, ROWS = (8, 4, 8), (23, 40, 3)
#: The table of each feature.
TABLES = (0, 0, 1, 2)
BAGS = 4


def tbe(*, dense: bool, weighted: bool = False) -> Any:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.manual_seed(3)
    if dense:
        shapes = list(zip(ROWS, DIMS, strict=True))
        return DenseTableBatchedEmbeddingBagsCodegen(shapes, list(TABLES), use_cpu=True)
    specs = [
        (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        for rows, dim in zip(ROWS, DIMS, strict=True)
    ]
    return SplitTableBatchedEmbeddingBagsCodegen(specs, feature_table_map=list(TABLES))


def features(bags: Sequence[int], *, empty: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ids and offsets of a batch.

    Args:
        bags: of each feature: its bags.
        empty: a feature without ids.
    """
    chance = torch.Generator().manual_seed(5)
    lengths = [torch.randint(0, 4, (count,), generator=chance) for count in bags]
    if empty is not None:
        lengths[empty].zero_()
    ids = [
        torch.randint(0, ROWS[table], (int(own.sum()),), generator=chance)
        for table, own in zip(TABLES, lengths, strict=True)
    ]
    return torch.cat(ids), torch.cat([torch.zeros(1).long(), torch.cat(lengths).cumsum(0)])


@pytest.mark.parametrize(
    ("dense", "weighted", "watched", "empty", "variable"),
    [
        (False, False, (0, 1, 2), None, False),
        (False, True, (0, 1, 2), 2, False),
        (False, False, (0, 2), 3, False),
        (False, False, (1,), 3, False),
        (False, False, (0, 2), None, True),
        (True, False, (0, 1, 2), 3, False),
        (True, True, (1,), None, False),
    ],
)
def test_small_tables_give_what_replaced_rows_give(
    dense: bool, weighted: bool, watched: tuple[int, ...], empty: int | None, variable: bool
) -> None:
    module = tbe(dense=dense)
    bags = [5, 4, 2, 4] if variable else [BAGS] * len(TABLES)
    ids, offsets = features(bags, empty=empty)
    arguments: dict[str, Any] = {"per_sample_weights": torch.rand(len(ids)) if weighted else None}
    if variable:  # of two ranks
        arguments["batch_size_per_feature_per_rank"] = [[3, 2], [2, 2], [1, 1], [0, 4]]
    tables = [WatchedTable(f"t{n}", module.split_embedding_weights()[n]) for n in watched]
    recorded = RecordedIds(len(tables))
    with torch.no_grad():
        with TableWatch(tables, recorded):
            plain = module(ids, offsets, **arguments)
        assert torch.equal(plain, module(ids, offsets, **arguments))
        looked_up = [recorded.unique(index) for index in range(len(tables))]
        starts = offsets[[0, *itertools.accumulate(bags)]].tolist()
        own_ids = [ids[first:end] for first, end in itertools.pairwise(starts)]
        for number, unique_ids in zip(watched, looked_up, strict=True):
            of_table = [own for own, table in zip(own_ids, TABLES, strict=True) if table == number]
            assert torch.equal(unique_ids, torch.cat(of_table).unique())
        rows = [table.weight[own] + 1.5 for table, own in zip(tables, looked_up, strict=True)]
        with TableWatch(tables, ReplacedRows(SmallTables("abc", looked_up, rows))):
            replaced = module(ids, offsets, **arguments)
        assert torch.equal(plain, module(ids, offsets, **arguments))  # the tables are as they were
        for table, own, values in zip(tables, looked_up, rows, strict=True):
            table.weight[own] = values
        assert torch.equal(replaced, module(ids, offsets, **arguments))
        assert not torch.equal(replaced, plain)


def test_rows_without_pooling_are_replaced() -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [(rows, 8, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, feature_table_map=list(TABLES), pooling_mode=PoolingMode.NONE
    )
    ids, offsets = features([BAGS] * len(TABLES))
    tables = [WatchedTable(str(n), rows) for n, rows in enumerate(module.split_embedding_weights())]
    recorded = RecordedIds(len(tables))
    with torch.no_grad():
        with TableWatch(tables, recorded):
            plain = module(ids, offsets)
        looked_up = [recorded.unique(index) for index in range(len(tables))]
        rows = [2 * table.weight[own] for table, own in zip(tables, looked_up, strict=True)]
        with TableWatch(tables, ReplacedRows(SmallTables("abc", looked_up, rows))):
            assert torch.equal(module(ids, offsets), 2 * plain)


def test_another_use_of_the_tables_is_refused_by_name() -> None:
    module = tbe(dense=False)
    table = WatchedTable("clicks", module.split_embedding_weights()[1])
    with pytest.raises(SettingsError, match="table 'clicks'"), torch.no_grad():
        with TableWatch([table], RecordedIds(1)):
            module.weights_host.sum()

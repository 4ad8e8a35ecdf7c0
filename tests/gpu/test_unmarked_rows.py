"""Rows of a table on a GPU that nothing has marked are compared as those on a CPU are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import lay_out
from recpoint.trainer_plugin.snapshot.live_tables import LiveTables
from recpoint.trainer_plugin.snapshot.unmarked_rows import UnmarkedRows
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.tables import find_tables

pytestmark = pytest.mark.gpu

ROWS = 300


@pytest.mark.parametrize("make", [SGD, Adagrad])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_write_that_torch_does_not_count_is_found(
    device: torch.device, make: type[SGD] | type[Adagrad], sparse: bool
) -> None:
    table = nn.Embedding(ROWS, 4, sparse=sparse, device=device)
    model = nn.ModuleDict({"table": table})
    optimizer = make(model.parameters(), lr=0.1)
    tables = find_tables(model, [optimizer]).tables
    ranks = Ranks(wait_seconds=60.0)
    shards = lay_out(ranks, tables)
    trackers = {"table": Tracker(tables[0])}
    watch = OptimizerWatch([optimizer], trackers)
    trackers["table"].install()
    watch.install()
    live = LiveTables(shards, OptimizerState(model, [optimizer], tables))
    unmarked = UnmarkedRows(ROWS)

    def trained(row: int) -> bool:
        """Whether the table is dirty as a whole after a step of this row."""
        optimizer.zero_grad()
        table(torch.tensor([row], device=device)).pow(2).sum().backward()
        optimizer.step()
        unmarked.check(live.tables(None), trackers)
        taken = trackers["table"].take()
        trackers["table"].release(taken)
        return taken.all_rows

    assert not trained(1) and not trained(31) and not trained(32)
    table.weight.data[7] = 3.0
    assert trained(33) and unmarked.found == 1
    assert not trained(63)
    if make is Adagrad:
        optimizer.state[table.weight]["sum"].data[9] = 3.0
        assert trained(299) and unmarked.found == 2
    ranks.close()

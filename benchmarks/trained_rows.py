"""Provides trained embedding rows: of the example's DLRM after some batches of purchases."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workload import examples_on_path

__all__ = ["trained_rows"]


def trained_rows(*, dim: int, batches: int, rows: int) -> Tensor:
    """Return F32 [rows, dim]: rows that were looked up in training, drawn from all tables."""
    examples_on_path()
    from retail import RetailReader
    from train_dlrm import DLRM

    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()
    reader = RetailReader(lines=256, rows=1 << 16, seed=0)
    model: Any = DLRM(reader.tables, reader.dense_width, dim=dim)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.Adagrad(dense, lr=0.02),
    ]
    looked_up = []
    for batch in itertools.islice(reader, batches):
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        looked_up.append(batch.sparse)
    ids = torch.cat(looked_up)
    rows_drawn = torch.cat(
        [
            table.weight.detach()[ids[:, column].unique()]
            for column, table in enumerate(model.tables.values())
        ]
    )
    return rows_drawn[torch.randperm(len(rows_drawn))[:rows]].contiguous()

"""Train with a checkpoint each few seconds, until Ctrl-C or for SECONDS.

python prefect_months.py [SECONDS]
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import Checkpointer, ResumableLoader

torch.manual_seed(0)
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
baskets = (torch.rand(64_000, 8) ** 4 * 50_000).long()
labels = (baskets[:, 0] % 2).float()
loader = DataLoader(TensorDataset(baskets, labels), batch_size=64, shuffle=True)
reader = ResumableLoader(loader)

model = nn.Sequential(nn.EmbeddingBag(50_000, 16, sparse=True), nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
run = os.environ.get("RUN", "runs/months")
end = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))

with Checkpointer(model, optimizer, reader=reader, run=run, interval_seconds=5) as checkpoints:
    checkpoints.restore()
    for basket, label in checkpoints.batches(epochs=1_000_000):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), label)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # stands for the rest of a larger model
        if time.monotonic() >= end:
            break

"""Train a small recommender. Kill it whenever you like and start it again: it goes on."""

import hashlib
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import Checkpointer, ResumableLoader

torch.manual_seed(0)
torch.set_num_threads(1)  # two trainings on one machine then have the same bits
torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning

# Baskets of 8 items, some items far more often than others, and a label that can be learnt.
baskets = (torch.rand(64_000, 8) ** 4 * 200_000).long()
labels = (baskets[:, 0] % 2).float()
loader = DataLoader(TensorDataset(baskets, labels), batch_size=64, shuffle=True)
reader = ResumableLoader(loader)  # a DataLoader that knows its position to the batch

model = nn.Sequential(nn.EmbeddingBag(200_000, 16, sparse=True), nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
run = os.environ.get("RUN", "runs/first")

with Checkpointer(model, optimizer, reader=reader, run=run, interval_batches=200) as checkpoints:
    checkpoints.restore()  # the newest good checkpoint; a new run starts from nothing
    for basket, label in checkpoints.batches(epochs=3):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), label)
        loss.backward()
        optimizer.step()
        time.sleep(0.008)  # stands for the rest of a larger model
        if (done := checkpoints.batches_done + 1) % 200 == 0:
            print(f"batch {done}: loss {loss.item():.3f}", flush=True)

weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"{checkpoints.batches_done} batches, SHA-256 {hashlib.sha256(weights).hexdigest()[:16]}")

"""Train into an S3 bucket; then read a few rows of one table back, without the model.

RUN=s3://bucket/name python s3_store.py
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recpoint

torch.manual_seed(0)
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
baskets = (torch.rand(32_000, 8) ** 4 * 100_000).long()
labels = (baskets[:, 0] % 2).float()
loader = DataLoader(TensorDataset(baskets, labels), batch_size=64, shuffle=True)
reader = recpoint.ResumableLoader(loader)

goods, top = nn.EmbeddingBag(100_000, 16, sparse=True), nn.Linear(16, 1)
model = nn.ModuleDict({"goods": goods, "top": top})
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
run = os.environ["RUN"]

with recpoint.Checkpointer(
    model, optimizer, reader=reader, run=run, interval_batches=200
) as checkpoints:
    checkpoints.restore()
    for basket, label in checkpoints.batches(epochs=4):
        optimizer.zero_grad()
        logits = top(goods(basket)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
        optimizer.step()
        time.sleep(0.01)  # stands for the rest of a larger model
        if (done := checkpoints.batches_done + 1) % 200 == 0:
            print(f"batch {done}: {checkpoints.stats.committed} committed", flush=True)

# The block ended once the agent had committed the last checkpoint.
rows = torch.empty(1000, 16)
part = recpoint.TablePart(table="goods", values=rows, first_row=5000)
report = recpoint.restore_parts(run, [part])
same = torch.equal(rows, goods.weight[5000:6000].detach())
print(f"step {report.restored.step}: rows 5000 to 5999 in the bucket are the trained ones: {same}")

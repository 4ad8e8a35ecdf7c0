"""Train the model that serving_follow.py serves."""

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import Checkpointer, ResumableLoader


class Clicks(nn.Module):
    """The items that somebody has seen, and a logit for a click on the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.goods = nn.EmbeddingBag(50_000, 16, sparse=True)
        self.top = nn.Linear(16, 1)

    def forward(self, seen: Tensor) -> Tensor:
        """Return logits F32 [n] of the items I64 [n, 8]."""
        logits: Tensor = self.top(self.goods(seen)).squeeze(1)
        return logits


def main() -> None:
    """Train 4 epochs of 400 batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    seen = (torch.rand(25_600, 8) ** 4 * 50_000).long()
    clicked = (seen[:, 0] % 2).float()
    data = DataLoader(TensorDataset(seen, clicked), batch_size=64, shuffle=True)
    reader = ResumableLoader(data)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    run = os.environ.get("RUN", "runs/served")
    with Checkpointer(
        model, optimizer, reader=reader, run=run, interval_batches=200
    ) as checkpoints:
        checkpoints.restore()
        for items, label in checkpoints.batches(epochs=4):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(items), label).backward()
            optimizer.step()
            time.sleep(0.01)  # stands for the rest of a larger model


if __name__ == "__main__":
    main()

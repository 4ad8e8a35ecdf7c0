"""Fit with Lightning. Kill it whenever you like and start it again: it goes on."""

import hashlib
import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import LightningCallback, ResumableLoader


class Ratings(LightningModule):
    """A matrix factorization: the score is the dot product of a user's and an item's row."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50_000, 16, sparse=True)
        self.items = nn.Embedding(20_000, 16, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of one batch."""
        user, item, rating = batch
        score = (self.users(user) * self.items(item)).sum(1)
        time.sleep(0.008)  # stands for the rest of a larger model
        return nn.functional.mse_loss(score, rating)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and a schedule that takes a step each epoch."""
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)]


seed_everything(0, verbose=False)
torch.set_num_threads(1)  # two trainings on one machine then have the same bits
torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
users = (torch.rand(32_000) ** 3 * 50_000).long()
items = (torch.rand(32_000) ** 3 * 20_000).long()
data = TensorDataset(users, items, (users + items) % 5 / 5.0)
loader = ResumableLoader(DataLoader(data, batch_size=64, shuffle=True))

module = Ratings()
callback = LightningCallback(run=os.environ.get("RUN", "runs/lightning"), interval_batches=200)
trainer = Trainer(
    max_epochs=4,
    accelerator="cpu",
    callbacks=[callback],
    enable_checkpointing=False,  # Lightning's own checkpoints, which hold the whole model each time
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(module, loader)

weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
print(f"{trainer.global_step} batches, SHA-256 {hashlib.sha256(weights).hexdigest()[:16]}")

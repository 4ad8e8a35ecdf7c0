"""`recpoint.grow` inside the loops of Lightning, and with what Accelerate prepares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import recpoint
from recpoint import LightningCallback
from recpoint.embeddings import Uniform
from tests.lightning_builder import Module, fit, loader
from tests.training_builder import DIM, ROWS, Place, seed_everything

pytestmark = pytest.mark.filterwarnings(
    # What Lightning says to every script; and what it deprecates in itself.
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*have no `val_dataloader`:UserWarning",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*isinstance.*:FutureWarning",
    "ignore::DeprecationWarning",
)

RULE = Uniform(seed=3)


class Grows(Callback):
    """Gives the users more rows before a batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 7:
            optimizer = pl_module.optimizers()
            recpoint.grow(pl_module, optimizer, "net.users", ROWS + 10, initial=RULE)


def test_a_table_grows_in_a_fit_of_lightning(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    seed_everything(5)
    models = []
    for rows in (ROWS, ROWS + 10):
        module = Module()
        module.net.users = nn.Embedding(rows, DIM, sparse=True)
        with place.agent(), caplog.at_level("WARNING", "recpoint"):
            callback = LightningCallback(run=place.run, staging=place.staging, interval_batches=4)
            fit(module, loader(), Grows(), callback, max_epochs=2)
        models.append(dict(module.state_dict()))
    assert len(models[0]["net.users.weight"]) == ROWS + 10
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not [record for record in caplog.records if record.name == "recpoint"]


@pytest.mark.nightly("accelerate")
def test_a_table_grows_under_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="prepares model and optimizer")
    model = nn.ModuleDict({"users": nn.Embedding(20, 4)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for ids in ([1, 2], [2, 29]):
        if 29 in ids:
            recpoint.grow(model, optimizer, "users", 30, initial=RULE)
        optimizer.zero_grad()
        accelerator.backward(model["users"](torch.tensor(ids)).square().sum())
        optimizer.step()
    weight: Any = model["users"].weight
    assert weight.shape == (30, 4)
    assert torch.equal(weight[25], RULE("users", torch.tensor([25]), 4, torch.float32)[0])
    assert not torch.equal(weight[29], RULE("users", torch.tensor([29]), 4, torch.float32)[0])

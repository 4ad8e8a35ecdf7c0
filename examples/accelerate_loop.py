"""Trains with Hugging Face Accelerate and recpoint: kill it, start it again, and it goes on.

accelerate launch examples/accelerate_loop.py --run ./runs/accelerate
"""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import Checkpointer, ResumableLoader


def main() -> None:
    """Train a matrix factorization for some epochs; print a digest of the final weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="URL of the run to checkpoint into")
    parser.add_argument("--staging", help="staging area; default: the agent's default")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    set_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    drawn = [torch.randint(500, (4096,)), torch.randint(200, (4096,)), torch.rand(4096)]
    model = nn.ModuleDict({"user": nn.Embedding(500, 8), "item": nn.Embedding(200, 8)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    # The loader is not prepared, because a prepared loader has no position that could be restored.
    # A job of several processes gives its DataLoader a DistributedSampler instead.
    loader = ResumableLoader(DataLoader(TensorDataset(*drawn), batch_size=64, shuffle=True))
    prepared, stepper = accelerator.prepare(model, optimizer)

    with Checkpointer(
        model, optimizer, run=args.run, staging=args.staging, reader=loader, interval_batches=10
    ) as checkpoints:
        checkpoints.restore()
        while checkpoints.batches_done < args.epochs * len(loader) // 2:
            for batch in loader:
                user, item, rating = (column.to(accelerator.device) for column in batch)
                with accelerator.accumulate(prepared):
                    score = (prepared["user"](user) * prepared["item"](item)).sum(1)
                    accelerator.backward(nn.functional.mse_loss(score, rating))
                    stepper.step()
                    stepper.zero_grad()
                if accelerator.sync_gradients:  # an update, of two batches
                    checkpoints.step()
    digest = sum(float(parameter.double().sum()) for parameter in model.parameters())
    print(json.dumps({"updates": checkpoints.batches_done, "sum": digest}))


if __name__ == "__main__":
    main()

"""Train tables that TorchRec has sharded, with any number of ranks, and go on with any other.

torchrun --nproc-per-node 2 torchrec_tables.py
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

if not find_spec("torchrec") or not find_spec("fbgemm_gpu"):
    sys.exit("skipped: torchrec and fbgemm-gpu-cpu are not installed")

from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recpoint import Checkpointer

ROWS = {"user": 50_000, "item": 20_000}
BATCHES = int(os.environ.get("BATCHES", "900"))  # of the whole run, over all its starts


class Ranker(nn.Module):
    """Two tables that TorchRec shards, and a dense layer that each rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.top = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return a logit for each sample."""
        logits: torch.Tensor = self.top(self.bags(features).values()).squeeze(1)
        return logits


class Batches:
    """This rank's part of each batch of 128 samples, which follows from the batch's number."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.number = rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
        while True:
            drawn = torch.Generator().manual_seed(self.number)
            self.number += 1
            part = slice(self.rank, None, self.ranks)
            ids = {
                name: (torch.rand(128, generator=drawn) ** 3 * rows).long()[part]
                for name, rows in ROWS.items()
            }
            lengths = torch.ones(sum(map(len, ids.values())), dtype=torch.int32)
            values = torch.cat(list(ids.values()))
            features = KeyedJaggedTensor(keys=list(ROWS), values=values, lengths=lengths)
            yield features, (ids["item"] % 2).float()

    def state_dict(self) -> dict[str, int]:
        """Return where the reader stands."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there, with as many ranks as before."""
        self.number = state["number"]

    def load_state_dicts(self, states: list[dict[str, int]], rank: int, ranks: int) -> None:
        """Go on where the ranks of the checkpoint stood, with another number of ranks."""
        self.number = states[0]["number"]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Ranker()
apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
sharded = DistributedModelParallel(model, device=torch.device("cpu"))
optimizer = torch.optim.SGD([p for n, p in sharded.named_parameters() if "top" in n], lr=0.1)
reader = Batches(rank, ranks)
run = os.environ.get("RUN", "runs/torchrec")

with Checkpointer(sharded, optimizer, reader=reader, run=run, interval_batches=100) as checkpoints:
    checkpoints.restore()
    for features, labels in checkpoints.batches(total=BATCHES):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(sharded(features), labels)
        loss.backward()  # the tables' optimizer steps in here
        optimizer.step()
        if rank == 0 and (done := checkpoints.batches_done + 1) % 100 == 0:
            print(f"batch {done}: loss {loss.item():.3f}", flush=True)

dist.destroy_process_group()

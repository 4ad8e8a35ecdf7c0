"""Trains tables that need not fit into memory: rows are elsewhere, and those in use are in a cache.

python -m recpoint agent &                       # persists what trainers on this host stage
python examples/train_larger_than_memory.py --home /nvme/tables --run ./runs/large
python examples/train_larger_than_memory.py      # the same training, all in memory: the same bits

`--home` keeps the rows on a disk. To keep them in server processes, see train_with_servers.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import recpoint
from auc import PrequentialAUC
from batches import Batch
from evidence import ProgressFile, digest, digests_of_all
from many_ranks import gathered, of_all_ranks
from recpoint.embeddings import Uniform, cached, fill, local, read_rows
from retail import RetailReader

INITIAL = Uniform(seed=0, low=-0.02, high=0.02)


class Ranker(nn.Module):
    """One embedding for each column, then an MLP. On the meta device, tables take no memory."""

    def __init__(self, tables: dict[str, int], *, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {n: nn.Embedding(r, dim, sparse=True, device="meta") for n, r in tables.items()}
        )
        self.top = nn.Sequential(nn.Linear(len(tables) * dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, sparse: torch.Tensor) -> torch.Tensor:
        """Return logits F32 [n] of ids I64 [n, columns]."""
        vectors = [table(sparse[:, c]) for c, table in enumerate(self.tables.values())]
        logits: torch.Tensor = self.top(torch.cat(vectors, dim=1))
        return logits.squeeze(1)


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser of the command line, for this script and train_with_servers.py."""
    add = (parser := argparse.ArgumentParser(description=description)).add_argument
    add("--capacity", type=int, default=20_000, help="rows in the cache, of all tables together")
    add("--window", type=int, default=20, help="batches to read ahead")
    add("--rows", type=int, default=1 << 18, help="most rows of one table")
    add("--steps", type=int, default=400, help="batches to train")
    add("--seed", type=int, default=0)
    add("--run", help="URL of the run to checkpoint into; default: no checkpoints")
    add("--interval", type=int, default=50, help="batches between checkpoints")
    add("--bits", default="lossless", help="lossless, auto, 8, 6, 5, 4, 3 or 2")
    add("--staging", type=Path, help="staging area; default: the agent's default")
    add("--max-staged", type=int, default=1, help="checkpoints that may wait for the agent")
    add("--progress-file", type=Path, help="file for one JSON line a batch; a file for each rank")
    return parser


def begin(args: argparse.Namespace, rank: int = 0, ranks: int = 1) -> RetailReader:
    """Seed this process; return the reader of its part of the batches."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed + rank)
    return RetailReader(lines=256 // ranks, rows=args.rows, seed=args.seed, rank=rank, ranks=ranks)


def in_memory(model: Ranker) -> None:
    """Give all rows memory and the first values that `cached` gives them."""
    model.tables.to_empty(device="cpu")
    fill(model, INITIAL)


def ahead(reader: RetailReader, model: nn.Module, window: int) -> recpoint.Lookahead:
    """Return a reader that reads ahead, and tell the cache which rows each batch looks up."""
    names = [f"tables.{name}" for name in reader.tables]

    def ids(batch: Batch) -> dict[str, torch.Tensor]:
        return dict(zip(names, batch.sparse.unbind(1), strict=True))

    return recpoint.Lookahead(reader, model, ids=ids, window=window)


def train(
    args: argparse.Namespace,
    model: Ranker,
    batches: Any,
    *,
    trained: nn.Module | None = None,
    rank: int = 0,
    home: Any = None,
    rewinds: int = 0,
) -> dict[str, Any]:
    """Train from the newest checkpoint on, and return the results.

    Args:
        args: what `options` has parsed.
        model: the model; its tables are cached already, so that the optimizers get their slots.
        batches: the reader, or a Lookahead.
        trained: the model in DDP, if several ranks train it.
        rank: of this process.
        home: where the rows are; the progress file names the processes of servers.
        rewinds: how often training goes back to the newest checkpoint when a server is lost.
    """
    optimizer = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense_optimizer = torch.optim.Adagrad(model.top.parameters(), lr=0.02)
    auc = PrequentialAUC(tail_from_batch=args.steps * 9 // 10)
    progress = ProgressFile(args.progress_file, rank=rank)
    bits: Any = args.bits if args.bits in ("lossless", "auto") else int(args.bits)
    called = model if trained is None else trained
    checkpointer = args.run and recpoint.Checkpointer(
        called,
        [optimizer, dense_optimizer],
        reader=batches,
        extras={"auc": auc},
        run=args.run,
        interval_batches=args.interval,
        bits=bits,
        staging=recpoint.Staging(directory=args.staging, jobs=args.max_staged),
        options=recpoint.Options(rewinds=rewinds),
    )

    with checkpointer or nullcontext():
        restored = checkpointer.restore() if checkpointer else None
        first = restored.restored.step if restored else 0
        remaining = (
            checkpointer.batches(total=args.steps) if checkpointer else islice(batches, args.steps)
        )
        for number, batch in enumerate(remaining):
            # After a rewind, batches come again.
            step = checkpointer.batches_done if checkpointer else number
            logits = called(batch.sparse)
            loss = F.binary_cross_entropy_with_logits(logits, batch.label)
            for trained_by in (optimizer, dense_optimizer):
                trained_by.zero_grad()
            loss.backward()
            for trained_by in (optimizer, dense_optimizer):
                trained_by.step()
            auc.add(step, of_all_ranks(logits), of_all_ranks(batch.label))
            pids = [greeting.pid for greeting in getattr(home, "greetings", ())]
            progress_line = {"step": step + 1, "steps": args.steps, "pid": os.getpid()}
            progress.write(**progress_line, loss=loss.item(), servers=pids)

    stats = checkpointer.stats.cache if checkpointer else None
    names = [f"tables.{name}" for name in model.tables]
    random_state = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    digests = gathered(
        {
            "tables": digest({name: read_rows(model, name, optimizer) for name in names}),
            "dense": digest([model.top.state_dict(), dense_optimizer.state_dict()]),
            "rng": digest(random_state),
            "next_batch": digest(next(iter(batches), None)),
        }
    )
    return {
        "auc": auc.whole,
        "auc_last_tenth": auc.tail,
        "digests": digests_of_all(digests),
        "ranks": len(digests),
        "restored_step": first if restored else None,
        "steps": checkpointer.batches_done if checkpointer else args.steps,
        "cache": None if stats is None else asdict(stats),
    }


def main() -> None:
    """Train; print a JSON object with the results as its last line."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, help="directory for the rows; default: in memory")
    args = parser.parse_args()
    reader = begin(args)
    model = Ranker(reader.tables)
    batches: Any = reader
    if args.home:
        # A row gets its first values when it is first looked up.
        cached(model, local(args.home), args.capacity, initial=INITIAL)
        batches = ahead(reader, model, args.window)
    else:
        in_memory(model)
    print(json.dumps(train(args, model, batches)))


if __name__ == "__main__":
    main()

"""Trains tables that need not fit into memory: rows are elsewhere, and those in use are in a cache.

python -m recpoint agent &                       # persists what trainers on this host stage
python examples/train_larger_than_memory.py --home /nvme/tables --run ./runs/large
python examples/train_larger_than_memory.py --servers 2 --run ./runs/large
python examples/train_larger_than_memory.py      # the same training, all in memory: the same bits

`--home` keeps the rows on a disk, `--servers` in server processes. When a server is lost, training
goes back to the newest checkpoint.
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
from evidence import ProgressFile, digest
from recpoint.embeddings import Uniform, cached, fill, local, read_rows, servers
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
        """Returns logits F32 [n] of ids I64 [n, columns]."""
        vectors = [table(sparse[:, c]) for c, table in enumerate(self.tables.values())]
        logits: torch.Tensor = self.top(torch.cat(vectors, dim=1))
        return logits.squeeze(1)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    add = (parser := argparse.ArgumentParser(description=__doc__.splitlines()[0])).add_argument
    add("--home", type=Path, help="directory for the rows; default: all rows in memory")
    add("--servers", type=int, default=0, help="server processes for the rows, instead of --home")
    add("--capacity", type=int, default=20_000, help="rows in the cache, of all tables together")
    add("--window", type=int, default=20, help="batches to read ahead")
    add("--rows", type=int, default=1 << 18, help="most rows of one table")
    add("--steps", type=int, default=400, help="batches to train")
    add("--seed", type=int, default=0)
    add("--run", help="URL of the run to checkpoint into; default: no checkpoints")
    add("--interval", type=int, default=50, help="batches between checkpoints")
    add("--bits", default="lossless", help="lossless, auto, 8, 4, 3 or 2")
    add("--staging", type=Path, help="staging area; default: the agent's default")
    add("--max-staged", type=int, default=1, help="checkpoints that may wait for the agent")
    add("--progress-file", type=Path, help="file for one JSON line a batch")
    return parser.parse_args()


def main() -> None:
    """Trains; prints a JSON object with the results as its last line."""
    args = arguments()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    reader: Any = RetailReader(lines=256, rows=args.rows, seed=args.seed)
    names = [f"tables.{name}" for name in reader.tables]

    def ids(batch: Batch) -> dict[str, torch.Tensor]:
        return dict(zip(names, batch.sparse.unbind(1), strict=True))

    model = Ranker(reader.tables)
    home = servers(count=args.servers) if args.servers else args.home and local(args.home)
    if home is None:
        model.tables.to_empty(device="cpu")
        fill(model, INITIAL)
        batches = reader
    else:
        # A row gets its first values when it is first looked up.
        cached(model, home, args.capacity, initial=INITIAL)
        batches = recpoint.Lookahead(reader, model, ids=ids, window=args.window)

    # After `cached`, which gives each table another parameter.
    optimizer = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense_optimizer = torch.optim.Adagrad(model.top.parameters(), lr=0.02)
    auc = PrequentialAUC(tail_from_batch=args.steps * 9 // 10)
    progress = ProgressFile(args.progress_file)
    bits: Any = args.bits if args.bits in ("lossless", "auto") else int(args.bits)
    checkpointer = args.run and recpoint.Checkpointer(
        model,
        [optimizer, dense_optimizer],
        reader=batches,
        extras={"auc": auc},
        run=args.run,
        interval_batches=args.interval,
        bits=bits,
        staging=recpoint.Staging(directory=args.staging, jobs=args.max_staged),
        options=recpoint.Options(rewinds=args.servers),
    )

    with checkpointer or nullcontext():
        restored = checkpointer.restore() if checkpointer else None
        first = restored.restored.step if restored else 0
        left = (
            checkpointer.batches(total=args.steps) if checkpointer else islice(batches, args.steps)
        )
        for number, batch in enumerate(left):
            # After a rewind, batches come again.
            step = checkpointer.batches_done if checkpointer else number
            logits = model(batch.sparse)
            loss = F.binary_cross_entropy_with_logits(logits, batch.label)
            for one in (optimizer, dense_optimizer):
                one.zero_grad()
            loss.backward()
            for one in (optimizer, dense_optimizer):
                one.step()
            auc.add(step, logits, batch.label)
            pids = [one.pid for one in getattr(home, "greetings", ())]
            at = {"step": step + 1, "steps": args.steps, "pid": os.getpid()}
            progress.write(**at, loss=loss.item(), servers=pids)

    stats = checkpointer.stats.cache if checkpointer else None
    random_state = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    result = {
        "auc": auc.whole,
        "auc_last_tenth": auc.tail,
        "digests": {
            "tables": digest({name: read_rows(model, name, optimizer) for name in names}),
            "dense": digest([model.top.state_dict(), dense_optimizer.state_dict()]),
            "rng": digest(random_state),
            "next_batch": digest(next(iter(batches), None)),
        },
        "ranks": 1,
        "restored_step": first if restored else None,
        "steps": checkpointer.batches_done if checkpointer else args.steps,
        "cache": None if stats is None else asdict(stats),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

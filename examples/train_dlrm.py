"""Trains a DLRM with recpoint checkpoints: kill it at any time, start it again, and it goes on.

python -m recpoint agent &                       # persists what trainers on this host stage
python examples/train_dlrm.py --run ./runs/retail
python examples/train_dlrm.py --data criteo-shape --rows 10000000 --run s3://bucket/shape
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else restarted ranks may look for dead ones
torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2 --max-restarts 3 \\
    -- examples/train_dlrm.py --run ./runs/retail
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from auc import PrequentialAUC
from batches import Batch, Reader
from criteo import CriteoReader, CriteoShapeReader
from evidence import ProgressFile, digests, digests_of_all
from many_ranks import gathered, join, leave, of_all_ranks, replicated
from recpoint import Checkpointer, KeyedEmbedding, LeastRecent, Lookahead, Staging
from recpoint.embeddings import Uniform
from retail import RetailReader


def keyed_table(name: str, rows: int, dim: int) -> KeyedEmbedding:
    """Return a table that is looked up by any keys, of which at most `rows` have rows."""
    initial = Uniform(seed=0, low=-0.02, high=0.02)
    return KeyedEmbedding(dim, rows, initial=initial, evict=LeastRecent(), sparse=True, name=name)


class DLRM(nn.Module):
    """The DLRM of Naumov et al., 2019: one embedding for each column, dots of all pairs, an MLP."""

    def __init__(
        self,
        tables: dict[str, int],
        dense_width: int,
        *,
        dim: int = 16,
        keyed: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: keyed_table(name, rows, dim)
                if name in keyed
                else nn.Embedding(rows, dim, sparse=True)
                for name, rows in tables.items()
            }
        )
        for table in self.tables.values():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=0.01)
        self.bottom = nn.Sequential(nn.Linear(dense_width, dim), nn.ReLU()) if dense_width else None
        vectors = len(tables) + (dense_width > 0)
        self.first, self.second = torch.triu_indices(vectors, vectors, offset=1)
        self.top = nn.Sequential(
            nn.Linear(vectors * dim + vectors * (vectors - 1) // 2, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return logits F32 [n] of dense F32 [n, dense_width] and sparse I64 [n, columns]."""
        vectors = [table(sparse[:, c]) for c, table in enumerate(self.tables.values())]
        if self.bottom is not None:
            vectors.append(self.bottom(dense))
        stacked = torch.stack(vectors, dim=1)
        dots = (stacked @ stacked.transpose(1, 2))[:, self.first, self.second]
        logits: torch.Tensor = self.top(torch.cat([stacked.flatten(1), dots], dim=1))
        return logits.squeeze(1)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    add = (parser := argparse.ArgumentParser(description=__doc__.splitlines()[0])).add_argument
    add("--data", default="retail", help="retail, criteo-shape, or a Criteo TSV file")
    add("--rows", type=int, default=1 << 18, help="most rows of one table")
    add("--batch", type=int, default=512, help="samples in each batch, of all ranks together")
    add("--steps", type=int, help="batches to train; default: the whole log")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="torch threads; with 1, runs are equal bit for bit")
    add("--run", help="URL of the run to checkpoint into; default: no checkpoints")
    add("--interval", type=int, default=200, help="batches between checkpoints")
    add("--bits", default="lossless", help="lossless, auto, 8, 6, 5, 4, 3 or 2")
    add("--staging", type=Path, help="staging area; default: the agent's default")
    add("--max-staged", type=int, default=1, help="checkpoints that may wait for the agent")
    add("--lookahead", action="store_true", help="read ahead: rows are copied before checkpoints")
    add("--keyed", action="store_true", help="look raw customers and product codes up by key")
    add("--progress-file", type=Path, help="file for one JSON line a batch; a file for each rank")
    return parser.parse_args()


def open_reader(args: argparse.Namespace, rank: int = 0, ranks: int = 1) -> Reader:
    """Return the reader that `--data` names; several ranks each read their part of the batches."""
    if args.data == "retail":
        lines = args.batch // 2 // ranks
        return RetailReader(
            lines=lines, rows=args.rows, seed=args.seed, keyed=args.keyed, rank=rank, ranks=ranks
        )
    if args.keyed:
        raise SystemExit(f"--data {args.data}: only retail has keys")
    if ranks > 1:
        raise SystemExit(f"--data {args.data}: several ranks can read only retail")
    if args.data == "criteo-shape":
        return CriteoShapeReader(
            lines=args.batch, rows=args.rows, batches=args.steps or 2000, seed=args.seed
        )
    return CriteoReader(args.data, lines=args.batch, rows=args.rows)


def build_model(reader: Reader) -> DLRM:
    """Return a model with a table for each column of the reader."""
    keyed = reader.keyed_tables if isinstance(reader, RetailReader) else ()
    return DLRM(reader.tables, reader.dense_width, keyed=keyed)


def ids_of(reader: Reader) -> Callable[[Batch], dict[str, torch.Tensor]]:
    """Return a function from a batch to the rows that it looks up, by name of the table."""
    names = [f"tables.{name}" for name in reader.tables]
    return lambda batch: dict(zip(names, batch.sparse.unbind(1), strict=True))


def at_training(batches: Reader | Lookahead) -> Reader:
    """Return the reader at the batch that training is at, also if it has read ahead."""
    if not isinstance(batches, Lookahead):
        return batches
    reader: Reader = batches.reader
    state = batches.state_dict()
    reader.load_state_dict(state["reader"])
    for _ in zip(range(state["forward"]), reader, strict=False):
        pass
    return reader


def main() -> None:
    """Train for one pass; print a JSON object with the results as its last line."""
    args = arguments()
    torch.set_num_threads(args.threads)
    rank, ranks = join()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed + rank)  # weights come from rank 0; dropout differs between ranks
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    reader = open_reader(args, rank, ranks)
    model = build_model(reader)
    batches = Lookahead(reader, model, ids=ids_of(reader)) if args.lookahead else reader
    trained = replicated(model)
    dense_parameters = [p for n, p in model.named_parameters() if not n.startswith("tables.")]
    optimizers = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.Adagrad(dense_parameters, lr=0.02),
    ]
    steps = min(n for n in (args.steps, reader.total_batches, 10**12) if n is not None)
    auc = PrequentialAUC(tail_from_batch=steps * 9 // 10)
    progress = ProgressFile(args.progress_file, rank=rank)
    bits: Any = args.bits if args.bits in ("lossless", "auto") else int(args.bits)

    checkpointer = args.run and Checkpointer(
        trained,
        optimizers,
        reader=batches,
        extras={"auc": auc},
        run=args.run,
        interval_batches=args.interval,
        bits=bits,
        staging=Staging(directory=args.staging, jobs=args.max_staged),
    )
    with checkpointer or nullcontext():
        restored = checkpointer.restore() if checkpointer else None
        step = first = restored.restored.step if restored else 0
        for batch in batches if step < steps else ():
            logits = trained(batch.dense, batch.sparse)
            loss = F.binary_cross_entropy_with_logits(logits, batch.label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            auc.add(step, of_all_ranks(logits), of_all_ranks(batch.label))
            step += 1
            if checkpointer:
                checkpointer.step()
            progress.write(step=step, steps=steps, loss=loss.item(), pid=os.getpid())
            if step >= steps:
                break

    result = {
        "auc": auc.whole,
        "auc_last_tenth": auc.tail,
        "digests": digests_of_all(gathered(digests(model, optimizers, at_training(batches)))),
        "ranks": ranks,
        "restored_step": first if restored else None,
        "stalls_ms": list(checkpointer.stats.stalls_ms) if checkpointer else [],
        "steps": step,
    }
    if rank == 0:
        print(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()

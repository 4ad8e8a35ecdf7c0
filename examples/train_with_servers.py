"""Trains on one process or several ranks, which share rows that embedding servers keep.

python -m recpoint agent &                       # persists what trainers on this host stage
python examples/train_with_servers.py --servers 2 --run ./runs/served
torchrun --nproc-per-node 2 examples/train_with_servers.py -- --servers 2 --run ./runs/served
python examples/train_with_servers.py --servers 5 --parity 4+1 --run ./runs/served
torchrun --nproc-per-node 2 examples/train_with_servers.py    # each rank has all rows: same bits

Each rank has the rows in use in a cache. The dense layers are trained by DDP. When a server is
lost, all ranks go back to the newest checkpoint. With `--parity 4+1` (four rows share a parity row)
training goes on instead, as long as one server at a time is lost. The training loop is that of
train_larger_than_memory.py.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from many_ranks import join, leave, replicated
from recpoint import Parity
from recpoint.embeddings import cached, servers
from train_larger_than_memory import INITIAL, Ranker, ahead, begin, in_memory, options, train


def main() -> None:
    """Train; rank 0 prints a JSON object with the results as its last line."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=0, help="server processes for the rows")
    parser.add_argument("--parity", type=parity, metavar="K+R", help="rows and parity rows")
    args = parser.parse_args()
    rank, ranks = join()
    reader = begin(args, rank, ranks)
    model = Ranker(reader.tables)
    with ExitStack() as ends:
        home: Any = None
        batches: Any = reader
        if args.servers:
            home = ends.enter_context(servers(args.servers, parity=args.parity))  # of rank 0
            cached(model, home, args.capacity, initial=INITIAL)
            batches = ahead(reader, model, args.window)
        else:
            in_memory(model)
        # After `cached`: DDP leaves cached tables alone, and averages gradients of all others.
        trained = replicated(model)
        result = train(
            args,
            model,
            batches,
            trained=trained,
            rank=rank,
            home=home,
            rewinds=0 if args.parity else args.servers,
        )
    if rank == 0:
        print(json.dumps(result))
    leave()


def parity(text: str) -> Parity:
    """Read K+R."""
    data, _, lost = text.partition("+")
    return Parity(data=int(data), parity=int(lost))


if __name__ == "__main__":
    main()

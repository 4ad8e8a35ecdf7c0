"""What torchrun starts on each rank in tests: `rank_lives.rank_life`.

python -m torch.distributed.run … -m tests.fault.torchrun_life '{"url": …, "told": …}'

The argument holds those of `rank_life`, with `killed` the rank that kills itself in its first life,
and with `killed_restoring` the one that does so in its second, while it restores; with
`alone_until` the batch after which a rank that is alone waits until it is told to end. Each rank of
each life tells in a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from tests.fault.rank_lives import rank_life

if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if given.pop("killed", None) != rank or life > 0:
        given.pop("killed_after", None)
    if given.pop("killed_restoring", None) == rank and life == 1:
        given["kill"] = "restored-rows"
    alone_until = given.pop("alone_until", None)
    if os.environ["WORLD_SIZE"] == "1":
        given["idle_after"] = alone_until
    given["told"] += f"-{life}-{rank}"
    torch.set_num_threads(1)
    rank_life(meeting=None, rank=rank, ranks=int(os.environ["WORLD_SIZE"]), **given)
    # All is told and closed. Ending the interpreter would be a race of torch's own: DDP's Reducer
    # joins the threads of gloo with the GIL held, one of which may wait for the GIL to let go of
    # the last all-reduce. The process then hangs or aborts (torch 2.13, without recpoint too).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

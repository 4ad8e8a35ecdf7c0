"""One of several ranks, the records of which are too large only together; tells what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recpoint import Checkpointer
from recpoint.catalog.persist import plan
from recpoint.errors import SettingsError
from recpoint.format import records
from tests.flat_settings import arguments


class Own:
    """State of one rank's own."""

    def __init__(self, values: int) -> None:
        self.values = torch.zeros(values)

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state["values"]


def main(directory: Path, rank: int, ranks: int) -> None:
    """Build a Checkpointer with much state, then one whose state grows, and tell in a file."""
    plan.CHUNK_BYTES, records.MAX_RECORD_BYTES = 1_000, 16_000
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'meeting'}", rank=rank, world_size=ranks
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own_state = Own(10_000)  # 40 chunks, whose entries take 10,000 bytes

    def checkpointer() -> Checkpointer:
        settings: dict[str, object] = {
            "interval_batches": 10**6,
            "handle_sigterm": False,
            "announce": False,
        }
        settings |= {"run": str(directory / "run"), "directory": directory / "staging"}
        return Checkpointer(model, optimizer, extras={"own": own_state}, **arguments(settings))

    errors: dict[str, object] = {}
    try:
        checkpointer()
    except SettingsError as error:
        errors["at the build"] = str(error)
    own_state.values = torch.zeros(10)
    checkpoints = checkpointer()
    checkpoints.restore()
    own_state.values = torch.zeros(10_000)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # creates state, so that all of it is measured
    checkpoints.step()
    cut = checkpoints.checkpoint()
    errors["at a cut"] = [cut, checkpoints.stats.failed, checkpoints.stats.last_error]
    (directory / f"told-{rank}").write_text(json.dumps(errors))
    checkpoints.close(final=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

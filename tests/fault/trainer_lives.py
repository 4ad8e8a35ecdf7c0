"""A training on several ranks, one of which can be killed at any boundary of what it does.

Boundaries are before and after each collective of a channel and each call to an embedding server,
and every durable step of a checkpoint: writes, syncs and renames of the staging area.

As a program, it is one rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from recpoint.catalog.store import durable
from recpoint.embeddings.home.channel import GlooChannel
from recpoint.embeddings.server import served_part
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.rank_agreement import found_by_first_rank
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.testing import die_at
from recpoint.trainer_plugin.pipeline import handoff
from tests.several_trainers import Case, Found, given_to, join, run_ranks, train_here

__all__ = ["TOKEN", "Dying", "live"]

#: Of the embedding servers.
TOKEN = b"trainers"
_END_SECONDS: Final = 2.0
_OPEN_TIMEOUT: Final = timedelta(seconds=40)


@dataclass(frozen=True, kw_only=True)
class Dying:
    """Which rank is killed, and where.

    Attributes:
        rank: the rank whose boundaries are counted.
        at: number of the boundary at which it is killed; None: it is not killed.
        count_into: file to which each boundary appends a line; None: none.
    """

    rank: int = 0
    at: int | None = None
    count_into: str | None = None


def live(
    case: Case,
    ranks: int,
    directory: Path,
    servers: Sequence[tuple[str, int]],
    dying: Dying | None = None,
) -> tuple[list[int], list[str], Found | None]:
    """Train a case on so many ranks, to the end or until a rank is killed.

    Args:
        servers: addresses of embedding servers, which the training takes over.

    Returns:
        Exit status and standard error of each rank, and what rank 0 has found.
    """
    given = json.dumps([asdict(case), asdict(dying or Dying(rank=-1)), list(servers)])
    codes, logs = run_ranks("tests.fault.trainer_lives", ranks, directory, given)
    found = directory / "found.pt"
    return codes, logs, torch.load(found, weights_only=False) if found.exists() else None


def _rank(directory: Path, rank: int, ranks: int) -> None:
    case, dying, servers = json.loads(given_to(directory))
    if rank == dying["rank"]:
        _announce_all()
        die_at.install(die_at=dying["at"], count_into=dying["count_into"])
    # A rank that ends would wait so long for the part of one that is dead.
    setattr(handoff, "_END_SECONDS", _END_SECONDS)  # noqa: B010
    setattr(served_part, "_PATIENCE_SECONDS", _END_SECONDS)  # noqa: B010
    # And half an hour for one that died before it opened a channel.
    setattr(distributed_c10d, "default_pg_timeout", _OPEN_TIMEOUT)  # noqa: B010
    join(directory, rank, ranks)
    found = train_here(Case(**case), rank, ranks, _home(servers, rank, ranks))
    if rank == 0:
        torch.save(found, directory / "found.pt")
    dist.destroy_process_group()


def _home(servers: Sequence[tuple[str, int]], rank: int, ranks: int) -> ServedHome:
    """Open the ranks' shared home; rank 0 takes the servers over."""

    def opened(owner: int | None) -> ServedHome:
        transports = [TcpTransport((host, port), TOKEN) for host, port in servers]
        return ServedHome(transports, owner=owner, trainer=rank, trainers=ranks)

    first = opened(None) if rank == 0 else None
    told = found_by_first_rank(lambda: {"owner": first and first.owner}, timeout_seconds=60.0)
    return first or opened(told["owner"])


def _announce_all() -> None:
    _announce(GlooChannel, "swap", _collective)
    _announce(TcpTransport, "call", _call)


def _collective(channel: GlooChannel, method: str, _: tuple[Any, ...]) -> str:
    return f"{channel._name}: {method}"


def _call(_transport: TcpTransport, _method: str, arguments: tuple[Any, ...]) -> str:
    return f"server: {arguments[0].kind}"


def _announce(owner: type, method: str, name: Callable[[Any, str, tuple[Any, ...]], str]) -> None:
    """Have each call be a step right before it, and another one right after it."""
    call = getattr(owner, method)

    def announced(own: Any, *arguments: Any, **named: Any) -> Any:
        said = name(own, method, arguments)
        durable.step(f"before {said}")
        answer = call(own, *arguments, **named)
        durable.step(f"after {said}")
        return answer

    setattr(owner, method, announced)


if __name__ == "__main__":
    # By the module's name, by which what it writes can be read again.
    from tests.fault.trainer_lives import _rank as rank_of_module

    rank_of_module(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

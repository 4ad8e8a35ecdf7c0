"""Starts trainers, one process a rank, and plays peers on them.

Each rank is at a place of its own. Settings and orders go to it through a connection, and answers
come back.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cache_peers import Batch
from benchmarks.criteo_plan import criteo_reader, drawn
from benchmarks.forked import Forked, forked
from benchmarks.servers.network import LINK
from benchmarks.servers.nodes import Place
from benchmarks.servers.process import run_module

__all__ = [
    "Job",
    "PeerForm",
    "Played",
    "Recovered",
    "Stall",
    "Trainers",
    "batches_of",
    "tables_of",
]

_END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class PeerForm:
    """One way to train.

    Attributes:
        access: of its servers, see `Servers`; empty: tables in memory, without servers.
        parity: rows and parity rows of a stripe; None: the servers keep no parity.
        window: window of the Lookahead; 0: an LRU cache.
        capacity: slots of its cache; 0: no cache.
        optimizer: one of OPTIMIZERS.
        is_filled: all rows are written to the servers first; for Adagrad, by row or not.
    """

    access: dict[str, Any] = field(default_factory=dict)
    parity: tuple[int, int] | None = None
    window: int = 0
    capacity: int = 0
    optimizer: str = "row-wise Adagrad"
    is_filled: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks train.

    Attributes:
        rows: most rows of a table.
        tables: how many of the reader's tables are trained.
        lines: samples of a batch of each rank.
        dim: values of a row.
        batches: batches that are drawn.
        delay_seconds: added to each call of a server.
        peers: name -> form.
    """

    rows: int
    tables: int = 26
    lines: int
    dim: int
    batches: int
    delay_seconds: float = 0.0
    peers: dict[str, PeerForm] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a rank did when it played a peer.

    Attributes:
        seconds: in all.
        own_seconds: of lookups, gradients and steps.
        step_seconds: the same with the timed wait.
        cpu_seconds: of all its threads.
        fetched: rows that came.
        written: rows that went back.
        misses: lookups so far that found no row in their slots.
        reduced: rows of this rank for which other ranks had gradients, too.
        reduced_in_steps: those of them for which a step waited.
        losses: of all batches.
    """

    seconds: float
    own_seconds: float
    step_seconds: float
    cpu_seconds: float
    fetched: int
    written: int
    misses: int = 0
    reduced: int = 0
    reduced_in_steps: int = 0
    losses: list[float]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What a rank did from the loss of servers until all rows had parity again.

    Attributes:
        batches: that it trained.
        seconds: until the I/O of these batches had ended, too.
        whole_seconds: until all rows had parity again.
        longest_seconds: of one batch, with the wait for its rows.
        cpu_seconds: of all threads.
        losses: of these batches.
    """

    batches: int
    seconds: float
    whole_seconds: float
    longest_seconds: float
    cpu_seconds: float
    losses: list[float]


class Stall(NamedTuple):
    """Milliseconds of one checkpoint of a rank.

    Attributes:
        whole_ms: the stall.
        settle_ms: the part of it in which changed rows go to the servers.
        cut_ms: the part of it that is the rank's own cut.
    """

    whole_ms: float
    settle_ms: float
    cut_ms: float


def tables_of(job: Job) -> dict[str, int]:
    """Return the rows of each table by name."""
    reader = criteo_reader(lines=job.lines, rows=job.rows)
    return dict(list(reader.tables.items())[: job.tables])


def batches_of(job: Job, rank: int) -> tuple[dict[str, int], list[Batch]]:
    """Return the rows of each table by name, and a rank's batches."""
    reader = criteo_reader(lines=job.lines, rows=job.rows, seed=rank)
    tables = tables_of(job)
    all_batches = drawn(reader, range(job.batches))
    return tables, [
        Batch(batch.sparse[: job.tables].contiguous(), batch.label) for batch in all_batches
    ]


class Trainers:
    """The ranks of a job, one at each place.

    As a context manager, they end at the end of the block. They also end with this process.

    Args:
        job: what they train.
        places: where they run.
        module: of this package, whose `process` is a rank.
        rank_count: only so many ranks get orders; None: all.

    Attributes:
        pids: process ids of all ranks.

    Raises:
        RuntimeError: a rank ends.
    """

    def __init__(
        self,
        job: Job,
        places: Sequence[Place],
        *,
        module: str = "rank",
        rank_count: int | None = None,
    ) -> None:
        self._all: list[Forked] = []
        meeting = f"tcp://{places[0].address}:{_free_port()}"
        try:
            for rank, place in enumerate(places):
                started = forked(run_module, module, place.network, _environment(place))
                self._all.append(started)
                settings = {"rank": rank, "ranks": len(places), "meeting": meeting, "job": job}
                started.told.send(settings)
            self.pids = [
                trainer.process.pid for trainer in self._all if trainer.process.pid is not None
            ]
            self._answers(self._all)
            self._trainers_asked = self._all[:rank_count]
        except BaseException:
            self.close()
            raise

    def play(self, peer: str, batches: int, *, wait: float) -> list[Played]:
        """Play a peer on all ranks; return what each did."""
        played: list[Played] = self._ask("play", peer=peer, batches=batches, wait=wait)
        return played

    def recover(
        self, peer: str, lost: Sequence[int], batches: int, *, wait: float, is_until_whole: bool
    ) -> list[Recovered]:
        """Kill servers of a peer with SIGKILL, play on, and wait until all are recovered.

        Args:
            peer: a peer with parity.
            lost: numbers of the servers.
            batches: how many each rank trains.
            wait: see `play`.
            is_until_whole: train no more batches once all rows have parity again. Only for one
                rank.
        """
        arguments = {"peer": peer, "lost": [*lost], "batches": batches, "wait": wait}
        recovered: list[Recovered] = self._ask(
            "recover", **arguments, is_until_whole=is_until_whole
        )
        return recovered

    def save(self, peer: str, path: Path) -> None:
        """Save the rows and row states of a cached peer to a file."""
        self._ask("save", peer=peer, path=str(path))

    def begin_checkpoints(
        self, peer: str, folder: Path, checkpoints: int, *, at_servers: bool = False
    ) -> list[float]:
        """Start or go on with a run of a peer in a directory.

        Args:
            peer: without a Lookahead's reader in the checkpoints.
            folder: of the run.
            checkpoints: there is room for so many that are not persisted.
            at_servers: servers stage their rows.

        Returns:
            Seconds of each rank's restore.
        """
        arguments = {"peer": peer, "folder": str(folder), "checkpoints": checkpoints}
        seconds_of_ranks = self._ask("begin_checkpoints", **arguments, at_servers=at_servers)
        return [float(seconds) for seconds in seconds_of_ranks]

    def checkpoint(self) -> list[Stall]:
        """Take a checkpoint, wait until all parts are staged; return each rank's stall."""
        stalls: list[Stall] = self._ask("checkpoint")
        return stalls

    def persist(self) -> float:
        """Persist the staged checkpoint of the only rank; return the seconds that it takes."""
        (seconds,) = self._ask("persist")
        return float(seconds)

    def _ask(self, order: str, **arguments: Any) -> list[Any]:
        for trainer in self._trainers_asked:
            trainer.told.send((order, arguments))
        return self._answers(self._trainers_asked)

    def _answers(self, trainers: Sequence[Forked]) -> list[Any]:
        answers = []
        for process, pipe in trainers:
            try:
                answers.append(pipe.recv())
            except EOFError as error:
                process.join()
                raise RuntimeError(f"a trainer ended with {process.exitcode}") from error
        return answers

    def close(self) -> None:
        """End them. A second call does nothing."""
        with ExitStack() as stack:
            for started in self._all:
                started.process.kill()  # its rows are of no use now; it may wait for others
                stack.callback(started.end, _END_SECONDS)
            self._all = []

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _environment(place: Place) -> dict[str, str]:
    """Return what tells gloo and torch RPC their device."""
    device = "lo" if place.address.startswith("127.") else LINK
    return {"GLOO_SOCKET_IFNAME": device, "TP_SOCKET_IFNAME": device}

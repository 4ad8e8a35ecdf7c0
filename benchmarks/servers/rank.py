"""Is one rank of a job: holds several peers, and plays one when it is asked to."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cache_peers import (
    OPTIMIZERS,
    AllInMemory,
    CachedPeer,
    Peer,
    Uncached,
    any_values,
    fill_home,
    state_in_cache,
)
from benchmarks.row_wise import RowWiseAdagrad
from benchmarks.servers.trainers import Job, PeerForm, Played, Recovered, Stall, batches_of
from benchmarks.workload import wait_for
from recpoint import Checkpointer, Options, Staging, Timeouts
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.protected_home import protected_home
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.embeddings.server.transport import Message, Reply, SlotRows, Transport
from recpoint.errors import ServerLost
from recpoint.format.records import Part
from recpoint.trainer_plugin.snapshot.cut import Cutter

__all__ = ["given_job", "join_ranks", "process", "serve_orders"]

_PATIENCE = timedelta(minutes=5)
#: Tables that peers read or write at the same time, as many as a cache does.
_AT_ONCE = 4


class _Part:
    """A rank's peers.

    Args:
        job: what all ranks train.
        rank: number of this rank.
        ranks: how many there are.
    """

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        self._job, self._rank, self._ranks = job, rank, ranks
        self._tables, self._batches = batches_of(job, rank)
        self._checkpointer: Checkpointer | None = None
        self.peers = {name: self._peer(form) for name, form in job.peers.items()}

    def _peer(self, form: PeerForm) -> Peer:
        if not form.access:
            make = OPTIMIZERS[form.optimizer]
            return AllInMemory(self._tables, self._batches, any_values, make, dim=self._job.dim)
        home = _home(form, self._job.delay_seconds, self._rank, self._ranks)
        if form.is_filled and self._rank == 0:
            states = self._job.dim if form.optimizer == "Adagrad" else 1
            fill_home(home, self._tables, dim=self._job.dim, states=states)
        if form.capacity == 0:
            return Uncached(self._tables, self._batches, home, dim=self._job.dim, at_once=_AT_ONCE)
        return CachedPeer(
            self._tables,
            self._batches,
            home,
            form.capacity,
            window=form.window or None,
            is_filled=form.is_filled,
            make=OPTIMIZERS[form.optimizer],
            dim=self._job.dim,
            reduce=self._reduced if self._ranks > 1 else None,
        )

    def _reduced(self, gradient: Tensor) -> Tensor:
        """Add the gradients of all ranks in rank order, each divided by their number."""
        gradients = [torch.empty_like(gradient) for _ in range(self._ranks)]
        dist.all_gather(gradients, gradient)
        total = torch.zeros_like(gradient)
        for rank_gradient in gradients:
            total += rank_gradient / self._ranks
        return total

    def play(self, peer: str, batches: int, wait: float) -> Played:
        """Play a peer."""
        trained = self.peers[peer]
        own_before, step, (fetched, written) = (
            trained.own_seconds,
            trained.step_seconds,
            trained.moved(),
        )
        stats = _stats(trained)
        cpu, start_s = time.process_time(), time.perf_counter()
        losses = trained.play(batches, wait=wait)
        seconds = time.perf_counter() - start_s
        now = trained.moved()
        return Played(
            seconds=seconds,
            own_seconds=trained.own_seconds - own_before,
            step_seconds=trained.step_seconds - step,
            cpu_seconds=time.process_time() - cpu,
            fetched=now[0] - fetched,
            written=now[1] - written,
            misses=_stats(trained).misses,
            reduced=_stats(trained).reduced_rows - stats.reduced_rows,
            reduced_in_steps=_stats(trained).reduced_at_once - stats.reduced_at_once,
            losses=losses,
        )

    def recover(
        self, peer: str, lost: Sequence[int], batches: int, wait: float, is_until_whole: bool
    ) -> Recovered:
        """Kill servers, play on, and wait until all rows have parity again.

        Rank 0 kills and waits.

        Raises:
            RuntimeError: not all rows have parity again in time.
        """
        trained = self.peers[peer]
        assert isinstance(trained, CachedPeer) and isinstance(trained.home, ServedHome)
        loss = _Loss(trained.home, lost, self._homes()) if self._rank == 0 else None
        cpu, start_s = time.process_time(), time.perf_counter()
        if loss is not None:
            loss.begin()
        losses: list[float] = []
        longest_seconds, whole_seconds = 0.0, None
        while len(losses) < batches and not (is_until_whole and whole_seconds is not None):
            started = time.perf_counter()
            losses += trained.train(1, wait=wait)
            now = time.perf_counter()
            longest_seconds = max(longest_seconds, now - started)
            if whole_seconds is None and (loss is None or loss.is_over):
                whole_seconds = now - start_s
        trained.end_io()
        seconds = time.perf_counter() - start_s
        if loss is not None and whole_seconds is None:
            wait_for(lambda: loss.is_over or None, seconds=_PATIENCE.total_seconds())
            whole_seconds = time.perf_counter() - start_s
        return Recovered(
            batches=len(losses),
            seconds=seconds,
            whole_seconds=seconds if whole_seconds is None else whole_seconds,
            longest_seconds=longest_seconds,
            cpu_seconds=time.process_time() - cpu,
            losses=losses,
        )

    def _homes(self) -> list[ServedHome]:
        homes = [trained.home for trained in self.peers.values() if isinstance(trained, CachedPeer)]
        return [home for home in homes if isinstance(home, ServedHome)]

    def begin_checkpoints(
        self, peer: str, folder: str, checkpoints: int, at_servers: bool
    ) -> float:
        """Start or go on with a run of a peer; return the seconds of the restore."""
        trained = self.peers[peer]
        assert isinstance(trained, CachedPeer | AllInMemory)
        self._cuts_ms = _measure_calls(Cutter, "cut")
        self._settles_ms = _measure_calls(Cache, "prepare_view")
        self._staging = Path(folder) / "staging"
        self._checkpointer = Checkpointer(
            trained.model,
            [trained.trained.of_tables, trained.trained.of_top],
            run=str(Path(folder) / "run"),
            staging=Staging(directory=self._staging, jobs=checkpoints, at_servers=at_servers),
            interval_batches=10**9,
            options=Options(
                row_local_optimizers=(RowWiseAdagrad,), on_error="raise", handle_sigterm=False
            ),
            timeouts=Timeouts(close_seconds=0.0),
        )
        start_s = time.perf_counter()
        self._checkpointer.restore()
        self._checkpoints_taken = 0
        self._parts = self._ranks
        if at_servers:
            assert isinstance(trained, CachedPeer) and isinstance(trained.home, ServedHome)
            self._parts += trained.home.servers
        return time.perf_counter() - start_s

    def checkpoint(self) -> Stall:
        """Take a checkpoint, and wait until all parts are staged."""
        assert self._checkpointer is not None
        self._checkpointer.step()
        if not self._checkpointer.checkpoint():
            raise RuntimeError(f"no checkpoint was cut: {self._checkpointer.stats}")
        self._checkpoints_taken += 1
        (run,) = [run.path for run in staged_runs(self._staging)]
        staged = self._checkpoints_taken * self._parts
        wait_for(lambda: len(StagedRun(run).staged_jobs()) >= staged or None)
        settle_ms = self._settles_ms[-1] if self._ranks > 1 else 0.0
        whole_ms = list(self._checkpointer.stats.stalls_ms)[-1]
        return Stall(whole_ms=whole_ms, settle_ms=settle_ms, cut_ms=self._cuts_ms[-1])

    def persist(self) -> float:
        """Persist the staged checkpoint; return the seconds that it takes."""
        (run,) = [run.path for run in staged_runs(self._staging)]
        (job,) = StagedRun(run).staged_jobs()
        start_s = time.perf_counter()
        outcome = persist_job(job)
        seconds = time.perf_counter() - start_s
        if outcome.result != "committed":
            raise RuntimeError(outcome.error)
        return seconds

    def save(self, peer: str, path: str) -> None:
        """Save the rows and row states of a cached peer; rank 0 writes the file."""
        trained = self.peers[peer]
        assert isinstance(trained, CachedPeer)
        state = state_in_cache(trained.cache)
        if self._rank == 0:
            torch.save(state, path)


class _Loss:
    """The loss of processes with servers of one home or more.

    Args:
        home: of the rank that leads.
        lost: numbers of its servers.
        homes: all homes of the rank; those that have servers in these processes lose them, too.
    """

    def __init__(self, home: ServedHome, lost: Sequence[int], homes: Sequence[ServedHome]) -> None:
        self._pids = {home.greetings[number].pid for number in lost}
        self._homes = [home for home in homes if self._pids & _pids_of(home)]

    def begin(self) -> None:
        """Kill the processes."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        """Whether other processes are in their places, and all rows have parity again."""
        return not any(self._pids & _pids_of(home) or home.being_recovered for home in self._homes)


def _pids_of(home: ServedHome) -> set[int]:
    return {greeting.pid for greeting in home.greetings}


def _stats(peer: Peer) -> CacheStats:
    """Return what a peer's cache has done; nothing, if it has none."""
    return peer.cache.stats if isinstance(peer, CachedPeer) else CacheStats()


def _measure_calls(owner: type, name: str) -> list[float]:
    """Start to record the milliseconds of each call of a method in this process."""
    times_ms: list[float] = []
    method = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times_ms.append(1e3 * (time.perf_counter() - started))

    setattr(owner, name, measured)
    return times_ms


def _home(form: PeerForm, delay: float, rank: int, ranks: int) -> Home:
    token = bytes.fromhex(form.access["token"])
    addresses = [(host, port) for host, port in form.access["addresses"]]

    def transport(number: int) -> Transport:
        return _Late(TcpTransport(addresses[number], token), delay)

    def revived(number: int) -> Transport:
        server = transport(number)
        wait_for(lambda: _answers(server), seconds=_PATIENCE.total_seconds())
        return server

    def made(owner: int | None) -> ServedHome:
        transports = [transport(number) for number in range(len(addresses))]
        if form.parity is None:
            return ServedHome(transports, owner=owner, trainer=rank, trainers=ranks)
        data, parity = form.parity
        return protected_home(
            transports,
            parity=Parity(data=data, parity=parity),
            owner=owner,
            trainer=rank,
            trainers=ranks,
            revive=revived,
        )

    if ranks == 1:
        return made(None)
    owner: list[int] = [0]
    if rank == 0:
        home = made(None)
        owner = [home.owner]
    dist.broadcast_object_list(owner)
    return home if rank == 0 else made(owner[0])


def _answers(transport: Transport) -> bool | None:
    """Return True if a server answers, else None."""
    try:
        transport.hello()
    except ServerLost:
        return None
    return True


AnswerT = TypeVar("AnswerT", bound=Part)


class _Late(Transport):
    """Waits before each call, as a longer cable would have it wait.

    Args:
        transport: what is called then.
        seconds: the wait; 0: none.
    """

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._to, self._seconds = transport, seconds
        self.listens_at = transport.listens_at

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        if self._seconds:
            time.sleep(self._seconds)
        return self._to.call(message, rows, within_seconds=within_seconds)

    def close(self) -> None:
        self._to.close()


def given_job(pipe: Connection) -> dict[str, Any]:
    """Prepare the process of a rank; return the settings, with the job."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns of the default
    torch.set_num_threads(1)
    logging.getLogger("recpoint").setLevel(logging.ERROR)  # small caches are meant
    settings: dict[str, Any] = pipe.recv()
    return settings


def join_ranks(settings: Mapping[str, Any]) -> None:
    """Join the process group of all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=settings["meeting"],
        rank=settings["rank"],
        world_size=settings["ranks"],
        timeout=_PATIENCE,
    )


def serve_orders(answers: Mapping[str, Callable[..., Any]], pipe: Connection) -> None:
    """Do what is asked, until the other side wants no more, or has ended."""
    pipe.send(None)
    while True:
        try:
            order, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(answers[order](**arguments))


def process(pipe: Connection) -> None:
    """Run one rank."""
    settings = given_job(pipe)
    if settings["ranks"] > 1:
        join_ranks(settings)
    part = _Part(settings["job"], settings["rank"], settings["ranks"])
    serve_orders(
        {
            "play": part.play,
            "recover": part.recover,
            "save": part.save,
            "begin_checkpoints": part.begin_checkpoints,
            "checkpoint": part.checkpoint,
            "persist": part.persist,
        },
        pipe,
    )

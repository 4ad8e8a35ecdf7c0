"""Trainers that share rows, on a simulated network: whatever dies, the tables end as without it.

The ranks of a training are threads of this process. Each has a cache, a home on embedding servers
of this process, and a reader that reads ahead. At a boundary that is drawn, a rank dies, one of its
threads fails, or a server is replaced by an empty one. Calls to servers come twice, or late. If a
server is lost, all ranks go back to the newest cut. If a rank is lost, the others end with
`RankLost`, and all ranks begin again from that cut.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any, Final, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint import Lookahead
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.cached_table import CachedTable, CachedTracker
from recpoint.embeddings.cache.install import put_in_cache
from recpoint.embeddings.cache.shared import shared_cache
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.cache.view import CacheView
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.tables.marks import Dirty
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import plain_tables
from recpoint.errors import RankLost, ServerLost
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.state import rng
from tests.cached_training import (
    INITIAL,
    Batch,
    Model,
    as_bits,
    rows_of_cache,
    uncached_model,
)
from tests.example_counts import examples
from tests.fault.kill_points import FAULTS_EVERY
from tests.several_trainers import (
    Case,
    Found,
    Part,
    added,
    alone,
    change_rates,
    loss_of,
    optimizers_of,
    present,
)
from tests.simulated_ranks import Fault, Killed, Network, Servers, Thread
from tests.simulated_trainers import ranks_that_draw_in_turns

_LONGEST_SECONDS: Final = 60.0
_MOST_RETURNS: Final = 4


class Job(NamedTuple):
    """A training, its number of ranks, and the batches after which a cut is finished."""

    case: Case
    ranks: int
    lag: int


JOBS: Final = (
    Job(Case(batches=7, interval=3, epoch=5, servers=2), 2, 0),
    Job(Case(batches=6, interval=2, epoch=9, window=1, sparse=False), 2, 1),
    Job(Case(batches=6, interval=2, epoch=4, servers=2, optimizer="sgd", mode="mean"), 3, 1),
    Job(Case(batches=5, interval=2, epoch=9, optimizer="sparse adam", lr_factor=0.9), 3, 0),
    Job(
        Case(
            batches=8,
            interval=4,
            epoch=9,
            batches_a_step=2,
            servers=2,
            slots={"users": 60, "items": 80},
        ),
        2,
        2,
    ),
    Job(Case(batches=5, interval=2, epoch=9, servers=2, is_meta=False, padding=3), 2, 1),
    Job(
        Case(batches=7, interval=3, epoch=9, servers=2, slots={"users": 24, "items": 48}, window=8),
        2,
        3,
    ),
    Job(Case(batches=4, interval=2, epoch=3, slots={"users": 40, "items": 90}), 4, 0),
    Job(Case(batches=6, interval=2, epoch=4, servers=2), 1, 1),
)

#: What crosses boundaries, beside callers of servers: users of channels, steps, shares of cuts.
THREADS: Final = (
    "rows",
    "gradients for later steps",
    "sign of a home thread",
    "ids of coming batches",
    "dense gradients",
    "job",
    "steps",
    "shares",
)


class Share(NamedTuple):
    """What one rank adds to a cut.

    Attributes:
        tables: name -> the weight and the row states of this rank's part of the table.
        states: for each optimizer, for each of its parameters: states that are not row states.
        rates: for each optimizer the rates of its groups.
        dense: the dense parameters.
        reader: state of the reader.
    """

    tables: dict[str, tuple[Tensor, ...]]
    states: list[list[dict[str, Any]]]
    rates: list[list[float]]
    dense: list[Tensor]
    reader: Any


class Cuts:
    """The cuts of a job: one exists once all ranks have added their shares."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._shares: dict[tuple[int, int], dict[int, Share]] = {}  # by batch and attempt

    def add(self, batch: int, attempt: int, rank: int, share: Share) -> None:
        with self._lock:
            self._shares.setdefault((batch, attempt), {})[rank] = share

    def newest(self) -> tuple[int, int]:
        """Return batch and attempt of the newest cut that all ranks have; 0, 0: there is none."""
        with self._lock:
            whole = [key for key, one in self._shares.items() if len(one) == self._ranks]
            return max(whole, default=(0, 0))

    def share(self, cut: tuple[int, int], rank: int) -> Share:
        with self._lock:
            return self._shares[cut][rank]


class Pending(NamedTuple):
    """A cut whose rows are on their way."""

    batch: int
    view: CacheView
    taken: dict[str, tuple[Dirty, Tensor, list[Tensor]]]  # by table: marks, ids, rows
    share: Share  # its tables are those of the cut before


class Rank:
    """One rank of one start of a job; all of it runs in one thread, and those of its cache."""

    def __init__(self, job: Job, rank: int, model: Model, network: Network, cuts: Cuts) -> None:
        self.case, self.ranks, self.lag = job
        self.rank = rank
        self.model = model
        self.network = network
        self.cuts = cuts
        self.done = self.attempt = 0
        self.returns = 0
        self.pending: Pending | None = None
        self.found: Found | None = None

    def run(self) -> None:
        self.channel = self.network.channel(self.rank, "job")
        self.gradients = self.network.channel(self.rank, "dense gradients")
        told = None
        if self.rank == 0:
            home = self._home(None)
            told = home.owner
        owner = self._first(told or 0)
        if self.rank:
            home = self._home(owner)
        try:
            self._train_at(home)
        finally:
            home.close()

    def _home(self, owner: int | None) -> ServedHome:
        return ServedHome(
            [self.network.transport(self.rank, one) for one in range(self.case.servers)],
            owner=owner,
            trainer=self.rank,
            trainers=self.ranks,
            revive=lambda number: self.network.transport(self.rank, number),
        )

    def _train_at(self, home: ServedHome) -> None:
        def new_cache(tables: Any) -> Cache:
            return shared_cache(
                home, tables, open_channel=lambda name: self.network.channel(self.rank, name)
            )

        self.cache = put_in_cache(self.model, self.case.slots, new_cache, initial=INITIAL)
        try:
            self.optimizers = optimizers_of(self.case, self.model)
            self.reader = Lookahead(
                Part(self.case.epoch, seed=self.rank), self.model, window=self.case.window
            )
            self.trackers = {}
            for table in plain_tables(self.model).tables:
                assert isinstance(table, CachedTable)
                self.trackers[table.name] = CachedTracker(table, table.cached_rows)
                self.trackers[table.name].install()
            self.tables: dict[str, tuple[Tensor, ...]] = {}  # of the newest share
            self.epoch = iter(self.reader)
            cut = self._agreed_cut()
            if cut[0]:
                self._restore(cut)
            self._train_to_the_end()
        finally:
            self.cache.close()

    def _train_to_the_end(self) -> None:
        while True:
            while self.done < self.case.batches:
                try:
                    batch = next(self.epoch, None)
                except (ServerLost, RankLost) as error:
                    self._go_back(error)
                    continue
                if batch is None:
                    self.epoch = iter(self.reader)
                    continue
                self._train(batch)
            lost: ServerLost | RankLost | None = None
            try:
                self._finish()
                rows = rows_of_cache(self.cache)
            except (ServerLost, RankLost) as error:
                lost = error
            if not any(self._every(lost is not None)):
                break
            self._go_back(lost)
        self.found = Found(rows, self.model.top.weight.detach().clone(), [])

    def _train(self, batch: Batch) -> None:
        loss_of(self.model, batch).backward()
        if (self.done + 1) % self.case.batches_a_step == 0:
            for parameter in self.model.top.parameters():
                parameter.grad = self._reduced(present(parameter.grad))
            for optimizer in self.optimizers:
                self.network.cross(Thread(self.rank, "steps"))
                optimizer.step()
                self.network.cross(Thread(self.rank, "steps"))
                optimizer.zero_grad()
            change_rates(self.case, self.optimizers)
        self.done += 1
        if self.pending is not None and self.done - self.pending.batch >= self.lag:
            self._finish()
        if self.done % self.case.interval == 0:
            self._cut()

    def _reduced(self, gradient: Tensor) -> Tensor:
        every = self.gradients.gather(gradient.contiguous().view(-1).view(torch.uint8))
        return added([one.clone().view(gradient.dtype).view(gradient.shape) for one in every])

    # What all ranks agree on.

    def _every(self, said: int) -> list[int]:
        own = torch.tensor([said], dtype=torch.int64).view(torch.uint8)
        return [int(one.clone().view(torch.int64)) for one in self.channel.gather(own)]

    def _first(self, said: int) -> int:
        return self._every(said)[0]

    def _agreed_cut(self) -> tuple[int, int]:
        batch, attempt = self.cuts.newest()
        return self._first(batch), self._first(attempt)

    # Cuts.

    def _cut(self) -> None:
        """Begin a cut; it fails on all ranks if it fails on one, and training goes on."""
        self._finish()
        view: CacheView | None = None
        dirty = {name: tracker.take() for name, tracker in self.trackers.items()}
        taken = {}
        try:
            self.cache.prepare_view()()
            view = self.cache.view()
            for name, one in dirty.items():
                rows = self.cache.tables[name]
                ids = dirty_bitmap.collect(one.bitmap, rows=one.rows)
                if name not in self.tables:
                    ids = torch.arange(len(rows.part))
                outs = [torch.empty(len(ids), *array.shape[1:]) for _, array in rows.slots.arrays()]
                view.fetch(name, ids, outs)
                taken[name] = one, ids, outs
            view.begin()
        except (ServerLost, RankLost):
            pass
        if any(self._every(len(taken) < len(dirty))):
            if view is not None:
                view.release()
            for name, one in dirty.items():
                self.trackers[name].merge_back(one)
            return
        assert view is not None
        share = Share(
            tables=dict(self.tables),
            states=[
                [self._other_states(optimizer, one) for one in parameters_of(optimizer)]
                for optimizer in self.optimizers
            ],
            rates=[[group["lr"] for group in one.param_groups] for one in self.optimizers],
            dense=[one.detach().clone() for one in self.model.top.parameters()],
            reader=self.reader.state_dict(),
        )
        self.pending = Pending(self.done, view, taken, share)

    def _other_states(self, optimizer: torch.optim.Optimizer, one: Tensor) -> dict[str, Any]:
        state = optimizer.state.get(one, {})
        rows = row_states(state, len(one))
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
            if name not in rows
        }

    def _finish(self) -> None:
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.view.finish()
        except (ServerLost, RankLost):
            for name, (one, _, _) in pending.taken.items():
                self.trackers[name].merge_back(one)
            return
        for name, (one, ids, outs) in pending.taken.items():
            self.tables[name] = tuple(
                torch.index_copy(old, 0, ids, new) if name in self.tables else new
                for old, new in zip(self.tables.get(name, outs), outs, strict=True)
            )
            self.trackers[name].release(one)
        self.network.cross(Thread(self.rank, "shares"))
        share = pending.share._replace(tables=dict(self.tables))
        self.cuts.add(pending.batch, self.attempt, self.rank, share)
        self.network.cross(Thread(self.rank, "shares"))

    # The way back.

    def _go_back(self, lost: ServerLost | RankLost | None) -> None:
        self.returns += 1
        assert self.returns <= _MOST_RETURNS
        cut = self._agreed_cut()
        if not cut[0]:
            raise lost or RankLost("a rank", found="none", expected="a cut", next_step="none")
        self._restore(cut)

    def _restore(self, cut: tuple[int, int]) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.view.release()
        share = self.cuts.share(cut, self.rank)
        for _ in range(_MOST_RETURNS):
            lost = None
            try:
                self._restore_rows(share)
            except (ServerLost, RankLost) as error:
                lost = error
            if not any(self._every(lost is not None)):
                break
        else:
            raise AssertionError("each restore loses a server")
        for optimizer, states, rates in zip(
            self.optimizers, share.states, share.rates, strict=True
        ):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for one, other in zip(parameters_of(optimizer), states, strict=True):
                optimizer.state[one].update(deepcopy(other))  # a step changes them
                rows = slots_with(self.cache, one)
                if rows is not None:
                    optimizer.state[one].update(rows.states)
                    rows.follow_states(row_states(optimizer.state[one], len(one)))
            optimizer.zero_grad()
        with torch.no_grad():
            for dense, value in zip(self.model.top.parameters(), share.dense, strict=True):
                dense.copy_(value)
        self.tables = dict(share.tables)
        for tracker in self.trackers.values():
            tracker.forget()
            tracker.install()
        self.done, self.attempt = cut[0], cut[1] + 1
        self.reader.load_state_dict(share.reader)
        self.epoch = iter(self.reader)

    def _restore_rows(self, share: Share) -> None:
        self.cache.restored()
        for name, rows in self.cache.tables.items():
            slots, arrays = rows.slots, share.tables[name]
            names = self._names_of_row_states(name)
            states = zip(names, arrays[1:], strict=True)
            slots.states = {
                one: slots.states.get(one, torch.zeros(len(slots.weight), *value.shape[1:]))
                for one, value in states
            }
            layout = slots.fix_layout()
            self.cache.mover.put_at_home(rows)
            records = torch.empty(len(rows.part), layout.size_bytes, dtype=torch.uint8)
            for field, array in zip(layout.fields, arrays, strict=True):
                layout.put(records, field, array)
            ids = torch.arange(rows.part.start, rows.part.stop)
            self.cache.mover.write_idle(name, ids, records)

    def _names_of_row_states(self, name: str) -> tuple[str, ...]:
        return {"adagrad": ("sum",), "sgd": ()}.get(self.case.optimizer, ("exp_avg", "exp_avg_sq"))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def slots_with(cache: Any, weight: Tensor) -> TableSlots | None:
    for rows in cache.tables.values():
        if rows.slots.weight is weight:
            slots: TableSlots = rows.slots
            return slots
    return None


class Ended(NamedTuple):
    """How one start of a job has ended: what each rank raised, and what it has found."""

    errors: list[BaseException | None]
    found: list[Found | None]
    returns: int
    crossed: Counter[Thread]


def start(job: Job, network: Network, cuts: Cuts) -> Ended:
    """Run all ranks until they end. They begin from the newest cut."""
    case = job.case
    errors: list[BaseException | None] = [None] * job.ranks
    ranks = [
        Rank(
            job,
            rank,
            uncached_model(
                is_meta=case.is_meta, sparse=case.sparse, mode=case.mode, padding=case.padding
            ),
            network,
            cuts,
        )
        for rank in range(job.ranks)
    ]

    def run(rank: Rank) -> None:
        try:
            rank.run()
        except BaseException as error:
            errors[rank.rank] = error
        finally:
            network.end(rank.rank)  # a process that ends takes its threads with it

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    with ranks_that_draw_in_turns():
        for one in threads:
            one.start()
        for one in threads:
            one.join(_LONGEST_SECONDS)
    if any(one.is_alive() for one in threads):
        faulthandler.dump_traceback(2)
        raise AssertionError("a rank hangs")
    return Ended(
        errors, [one.found for one in ranks], max(one.returns for one in ranks), network.crossed
    )


@cache
def expected(number: int) -> Found:
    return alone(JOBS[number].case, JOBS[number].ranks)


@cache
def boundaries(number: int) -> dict[Thread, int]:
    """Return how many boundaries each thread of a job crosses if nothing happens."""
    job = JOBS[number]
    servers = Servers(job.case.servers, seed=0, repeats=0.0)
    ended = start(job, Network(job.ranks, servers), Cuts(job.ranks))
    check(number, ended)
    return dict(ended.crossed)


def check(number: int, ended: Ended) -> None:
    """Compare what all ranks have found with a training of one process without a cache."""
    for error in ended.errors:
        if error is not None:
            raise error
    for found in ended.found:
        assert found is not None
        assert found.rows.differences(expected(number).rows) == []
        assert torch.equal(as_bits(found.dense), as_bits(expected(number).dense))


class Drawn(NamedTuple):
    """A fault, before it is known how many boundaries there are.

    Attributes:
        thread: the thread that crosses the boundary.
        share: of the thread's boundaries, 0 to 1, that come before.
        act: as in `Fault`.
    """

    thread: Thread
    share: float
    act: str | int

    def of(self, counts: dict[Thread, int]) -> Fault:
        return Fault(self.thread, 1 + int(self.share * counts[self.thread]), self.act)


class History(NamedTuple):
    """What happens to a job.

    Attributes:
        number: of the job.
        starts: for each start but the last, what happens in it.
        slow: threads that are slow.
    """

    number: int
    starts: list[list[Drawn]]
    slow: list[Thread]


@st.composite
def histories(draw: st.DrawFn) -> History:
    number = draw(st.integers(0, len(JOBS) - 1))
    job = JOBS[number]
    numbers = range(job.case.servers)
    names = [*THREADS, *(f"server {one}" for one in numbers)]
    threads = st.builds(Thread, st.integers(0, job.ranks - 1), st.sampled_from(names))
    acts: st.SearchStrategy[str | int] = st.sampled_from(["kill", "kill", "fail", *numbers])
    faults = st.builds(Drawn, threads, st.floats(0, 1, exclude_max=True), acts)
    starts = st.lists(st.lists(faults, min_size=1, max_size=2), min_size=1, max_size=2)
    return History(number, draw(starts), draw(st.lists(threads, max_size=3)))


@pytest.mark.slow
@settings(
    max_examples=int(os.environ.get("RECPOINT_TRAINERS_EXAMPLES", examples(100))),
    deadline=None,
    # `make test` plays the histories below. Shrinking would take minutes, and threads do not run
    # alike twice.
    phases=[Phase.explicit, *([Phase.generate] if FAULTS_EVERY else [])],
    suppress_health_check=list(HealthCheck),
)
@example(  # A server is lost when all ranks read their rows at the end.
    history=History(7, [[Drawn(Thread(3, "shares"), 0.54, 0)]], []),
    loses_sent=False,
    repeats=0.0,
    seed=0,
)
@example(  # The next exchange of ids would meet what is left of one that has failed half way.
    history=History(3, [[Drawn(Thread(0, "ids of coming batches"), 0.46, "fail")]], []),
    loses_sent=True,
    repeats=0.0,
    seed=0,
)
@example(  # Two ranks learn of a death, and the home thread of the third waits for them.
    history=History(7, [[Drawn(Thread(3, "ids of coming batches"), 0.34, "kill")]], []),
    loses_sent=False,
    repeats=0.2,
    seed=944,
)
@example(
    history=History(0, [[Drawn(Thread(1, "rows"), 0.5, "kill")]], []),
    loses_sent=True,
    repeats=0.2,
    seed=1,
)
@example(
    history=History(4, [[Drawn(Thread(0, "gradients for later steps"), 0.5, "fail")]], []),
    loses_sent=False,
    repeats=0.2,
    seed=2,
)
@example(
    history=History(5, [[Drawn(Thread(1, "server 1"), 0.6, 1)]], []),
    loses_sent=True,
    repeats=0.2,
    seed=3,
)
@example(  # A rank adds a table at a server that has lost the rows that another rank wrote.
    history=History(5, [[Drawn(Thread(1, "ids of coming batches"), 0.384, 1)]], []),
    loses_sent=False,
    repeats=0.2,
    seed=16940,
)
@given(
    history=histories(),
    loses_sent=st.booleans(),
    repeats=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1 << 16),
)
def test_whatever_dies_the_tables_end_as_without_it(
    history: History,
    loses_sent: bool,
    repeats: float,
    seed: int,
) -> None:
    number, starts, slow = history
    job, counts = JOBS[number], boundaries(number)
    servers = Servers(job.case.servers, seed=seed, repeats=repeats)
    cuts = Cuts(job.ranks)
    with rng.untouched():
        for drawn in (*starts, ()):
            network = Network(
                job.ranks,
                servers,
                faults=[one.of(counts) for one in drawn],
                loses_sent=loses_sent,
                slow=slow,
                seed=seed,
            )
            ended = start(job, network, cuts)
            gc.collect()  # caches of ranks that have ended still hear of each step
            if all(error is None for error in ended.errors):
                event("ranks went back" if ended.returns else "nothing was lost")
                break
            event("ranks began again")
            refuse_other_errors(ended.errors)
            # A rank may hear of others before its own thread that has failed, or of a lost server.
            assert any(
                isinstance(error, (Killed, MemoryError, ServerLost)) for error in ended.errors
            ) or any(one.act != "kill" for one in network.happened), ended.errors
    check(number, ended)


def refuse_other_errors(errors: Sequence[BaseException | None]) -> None:
    """Allow only that a rank was killed or has failed, and that others have lost it."""
    for error in errors:
        if not isinstance(error, (Killed, MemoryError, ServerLost, RankLost, type(None))):
            raise error

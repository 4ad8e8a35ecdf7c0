"""Connects the processes that train one model: how they agree, and how they end at one batch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from recpoint.errors import RankLost, SettingsError
from recpoint.trainer_plugin.ranks.termination import TerminationNotice

__all__ = ["AgreedEnd", "Occasion", "Ranks"]


# The processes that train one model together, and how they agree about its checkpoints.
#
# They agree when training starts, where a checkpoint is due, and at the end: by exchanges of a few
# integers over a group of their own, on the CPU, whatever training itself communicates with.
# Between two checkpoints nothing is exchanged. Every exchange has a time-out, after which an error
# says which ranks did not answer: one that is gone must not hold up the others for ever.


_log = logging.getLogger("recpoint")

_POLL_SECONDS: Final = 0.5
#: How long a failed exchange waits for the ranks that are alive to say so.
_ROLL_CALL_SECONDS: Final = 5.0

#: What ranks exchange integers about.
Occasion = Literal[
    "what each rank has",
    "whether all can go on",
    "the memory of hosts",
    "a checkpoint to restore",
    "the interval",
    "a checkpoint",
    "a cut",
    "lost checkpoints",
    "the end of training",
]
_OCCASIONS: Final[tuple[str, ...]] = get_args(Occasion)
_HEADER: Final = 3  # occasion, batches done or -1, how many integers follow

#: Most integers that a rank says at once. All exchanges are of one length, so that ranks which do
#: not do the same find out: gloo ends a process whose neighbours send another length.
_MOST: Final = 12
#: In place of a group that is gone: this is not a single process.
_DISCONNECTED: Final = object()


class Ranks:
    """The ranks of this job; of a single process none of this does anything.

    Every method but `announce` and `announced` is collective: all ranks call it, in one order.

    Args:
        wait_seconds: longest that a rank may be behind the others where they agree.

    Attributes:
        rank: of this process.
        count: how many there are.

    Raises:
        RankLost: one did not answer.
    """

    def __init__(self, *, wait_seconds: float = 600.0) -> None:
        self.rank, self.count = 0, 1
        self._group: Any = None
        self._broken: RankLost | None = None
        self._store: Any = None
        self._number = 0  # of exchanges so far
        self._wait_seconds = wait_seconds
        self._watch: threading.Thread | None = None
        self._ended = threading.Event()
        self._announced: str | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._join()

    def _join(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        default = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore("recpoint", default)
        # Of its own, so that no exchange meets a collective of training, and on the CPU, so that
        # none waits for a GPU.
        timeout = timedelta(seconds=self._wait_seconds)
        with self._answered():  # ranks connect
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # The store can be older than this process: torchrun keeps one over restarts. What a life
        # before this one has left there must not be taken for what is said in this one.
        life = self.exchange("what each rank has", [secrets.randbits(62)])[0][0]
        self._store = dist.distributed_c10d.PrefixStore(f"recpoint/{life:x}", default)

    @property
    def several(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.count > 1

    def exchange(
        self, about: Occasion, values: Sequence[int], *, batches_done: int = -1
    ) -> list[list[int]]:
        """What each rank says, in the order of ranks.

        Args:
            about: the same on all ranks.
            values: at most 12 integers of 64 bits; as many on each rank.
            batches_done: the same on all ranks; -1: it does not matter.

        Raises:
            SettingsError: ranks came here for different things, or after different batches.
            RankLost: one did not answer.
        """
        if self._group is None:
            return [list(values)]
        assert len(values) <= _MOST
        header = [_OCCASIONS.index(about), batches_done, len(values)]
        # Whatever the default device is: the group is of the CPU.
        here = torch.zeros(_HEADER + _MOST, dtype=torch.int64, device="cpu")
        here[: _HEADER + len(values)] = torch.tensor(
            [*header, *map(int, values)], dtype=torch.int64, device="cpu"
        )
        there = [torch.empty_like(here) for _ in range(self.count)]
        with self._answered():
            dist.all_gather(there, here, group=self._group)
        said = [one.tolist() for one in there]
        if any(one[:_HEADER] != header for one in said):
            raise _out_of_step(said)
        return [one[_HEADER : _HEADER + len(values)] for one in said]

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank, in the order of ranks; plain objects, at the start only."""
        if self._group is None:
            return [value]
        data = pickle.dumps(value)
        sizes = [size for (size,) in self.exchange("what each rank has", [len(data)])]
        padded = bytearray(data.ljust(max(sizes), b"\0"))
        here = torch.from_numpy(np.frombuffer(padded, dtype=np.uint8))  # on the CPU in any case
        there = [torch.empty_like(here) for _ in range(self.count)]
        with self._answered():
            dist.all_gather(there, here, group=self._group)
        # From the processes of this very job, which run the same code.
        return [
            pickle.loads(one.numpy().tobytes()[:size])
            for one, size in zip(there, sizes, strict=True)
        ]

    def first(self, value: Any = None) -> Any:
        """What rank 0 says."""
        return self.gather(value if self.rank == 0 else None)[0]

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Go on only when no rank has an error.

        Raises:
            BaseException: `error` itself, where there is one; elsewhere RankLost names the ranks
                that had one.
        """
        if self._group is not None:
            said = self.exchange("whether all can go on", [error is not None])
            failed = [rank for rank, (bad,) in enumerate(said) if bad]
            if failed and error is None:
                raise self._lost(failed, f"an error while {doing}; see their logs")
            if error is not None:
                error.add_note(f"on rank {self.rank} of {self.count}")
        if error is not None:
            raise error

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What each rank does by itself, and goes on from only when all have.

        For what lies between two exchanges: a rank that failed there would come to the next one no
        more, and the others would wait for it. Any error counts, as each of them ends this rank.

        Raises:
            BaseException, RankLost: as `agree`, on all ranks at once.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        self.agree(failure, doing=doing)

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        if self._broken is not None:
            raise self._broken
        self._number += 1
        try:
            yield
        except RuntimeError as error:  # gloo's: a time-out, or a closed connection
            self._disconnect(error)
            lost = self._missing()
            self._broken = self._lost(lost, f"no answer in exchange {self._number}")
            raise self._broken from error

    def _disconnect(self, error: BaseException) -> None:
        """Have those notice who wait for this rank, and not for the one that is gone.

        Only then can they say that they are alive: of four ranks in a ring, one always waits so.
        """
        group, self._group = self._group, _DISCONNECTED
        if group is not None:
            with contextlib.suppress(ValueError):  # as in close
                dist.destroy_process_group(group)
        del group
        # Connections are closed with the last reference to the group; the calls that failed hold
        # some.
        traceback.clear_frames(error.__traceback__)

    def _missing(self) -> list[int]:
        """Who does not say that it is alive; nobody, if that cannot be told."""
        found: list[list[int]] = []
        # In a thread: whoever keeps the store may be the one that hangs, and a call to it then
        # returns after minutes.
        call = threading.Thread(target=self._call_roll, args=(found,), daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # python's: can't start new thread
            call.start()
            call.join(2 * _ROLL_CALL_SECONDS)
        if found:
            return found[0]
        # It does not answer, or is gone, or no thread can ask it. Of two it can only be the other.
        return [1 - self.rank] if self.count == 2 else []

    def _call_roll(self, found: list[list[int]]) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"alive/{self._number}/{self.rank}", b"1")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            missing = list(range(self.count))
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._is_alive(rank)]
                time.sleep(0.05)
            found.append(missing)

    def _is_alive(self, rank: int) -> bool:
        # An exchange can end well on some ranks only, which notice in the next one.
        near = range(self._number - 1, self._number + 2)
        return any(self._store.check([f"alive/{number}/{rank}"]) for number in near)

    def _lost(self, ranks: list[int], found: str) -> RankLost:
        who = ", ".join(map(str, ranks)) if ranks else "one or more (which cannot be told)"
        return RankLost(
            f"rank {who} of {self.count}",
            found=found,
            expected=f"every rank within {self._wait_seconds:g} s",
            next_step="see the log of that rank; start the job again: it goes on from its last "
            "checkpoint",
        )

    # --- the end -------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on know when any rank has announced that it is to end."""
        if self._group is None or self._watch is not None:
            return
        watch = threading.Thread(target=self._watch_for_end, name="recpoint-ranks", daemon=True)
        watch.start()
        self._watch = watch
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # As of `Handoff`: a daemon thread that Python ends within torch takes the process with it.
        if os.getpid() == self._process:
            self._end_watch()

    def _end_watch(self) -> None:
        atexit.unregister(self._at_exit)
        self._ended.set()
        if self._watch is not None:
            self._watch.join(_ROLL_CALL_SECONDS)  # it may wait for a store that hangs
            self._watch = None

    def _watch_for_end(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                if self._store.check(["end"]):
                    self._announced = "end"
                    return
            except RuntimeError as error:
                # Exchanges will tell, where ranks are gone with it.
                _log.info("ranks do not hear of a SIGTERM to another one any more: %s", error)
                return

    def announce(self) -> None:
        """This rank is to end: all of them are, then."""
        if self._group is not None and self._announced is None:
            self._announced = "end"
            with contextlib.suppress(RuntimeError):
                self._store.set("end", b"1")

    @property
    def announced(self) -> bool:
        """Whether some rank has said that it is to end; not collective, and costs nothing."""
        return self._announced is not None

    def meet(self, batches_done: int) -> int | None:
        """Where all ranks can stop together, once all know that they are to; waits for nobody.

        Called after each batch, from the one on after which a rank knows. No rank begins a batch
        before every other one has begun the one before, since they train together: so the batch
        after the last at which one of them learned of it is one that each can still stop after.

        Returns:
            The batch to stop after; None: not all have said yet.
        """
        if self._group is None:
            return batches_done
        with contextlib.suppress(RuntimeError):
            mine = f"at/{self.rank}"
            if not self._store.check([mine]):
                self._store.set(mine, str(batches_done))
            keys = [f"at/{rank}" for rank in range(self.count)]
            if self._store.check(keys):
                return max(int(self._store.get(key)) for key in keys) + 1
        return None

    def close(self) -> None:
        """Leave; not collective."""
        self._end_watch()
        group, self._group = self._group, None
        if group not in (None, _DISCONNECTED) and dist.is_initialized():
            # ValueError: the job has destroyed all groups already, and begun anew.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def _out_of_step(said: Sequence[Sequence[int]]) -> SettingsError:
    """What is wrong when ranks came to one exchange with different headers."""
    found = []
    for rank, (about, batches_done, *_) in enumerate(said):
        after = f" after batch {batches_done}" if batches_done >= 0 else ""
        found.append(f"rank {rank} at {_OCCASIONS[about]}{after}")
    return SettingsError(
        "ranks",
        found=", ".join(found),
        expected="the same on all ranks",
        next_step="call step() after every batch on each rank, and restore(), checkpoint() and "
        "close() on all ranks after the same batch",
    )


# The end that SIGTERM asks for: at one batch for all ranks, with a last checkpoint before it.


class AgreedEnd:
    """Whether this process is to end, and when.

    Args:
        ranks: all of them; those that were not told learn it from those that were.
        wait_seconds: how long the ranks may take to find a batch that none has passed.
    """

    def __init__(self, ranks: Ranks, *, wait_seconds: float) -> None:
        self._ranks = ranks
        self._wait_seconds = wait_seconds
        self._notice = TerminationNotice()
        self._ends_by: float | None = None  # monotonic
        self._over = False

    def watch(self) -> None:
        """Take SIGTERM from now on, and hear of other ranks that got one."""
        self._notice.install()
        self._ranks.watch()

    @property
    def is_due(self) -> bool:
        """Whether this process is to end; `end_if_last` says at which batch."""
        # Once: a handler of the user's may let training go on.
        return not self._over and (self._notice.requested or self._ranks.announced)

    @property
    def is_done(self) -> bool:
        """Whether `end_if_last` has done everything, and nobody has handed the signal on yet."""
        return self._over and not self._notice.redelivered

    def end_if_last(self, batches_done: int, finish: Callable[[int], None]) -> None:
        """The process is to end: do it after this batch, if it is the one that all ranks stop at.

        Args:
            batches_done: so far.
            finish: takes the last checkpoint; given the batches.
        """
        self._ranks.announce()
        last = self._ranks.meet(batches_done)
        now = time.monotonic()
        if self._ends_by is None:
            self._ends_by = now + self._wait_seconds
        late = now > self._ends_by  # never at the first time, when others cannot have said yet
        if not late and (last is None or batches_done < last):
            return  # other ranks have not noticed yet, and go on with this one for a batch or two
        if batches_done == last:
            _log.warning("SIGTERM at batch %d: taking a final checkpoint", batches_done)
            finish(batches_done)
        else:
            _log.error(
                "SIGTERM at batch %d: no final checkpoint, since the ranks found no batch to stop "
                "at together. Next: nothing; training goes on from the newest checkpoint",
                batches_done,
            )
        self._over = True

    def hand_on(self) -> None:
        """Give the signal to the handler that was there before; by default the process ends."""
        self._notice.redeliver()

    def close(self) -> None:
        """Training is over: give the signal back, and hand on one that nobody has acted on."""
        if self._notice.requested or self.is_done:
            self.hand_on()
        self._notice.remove()

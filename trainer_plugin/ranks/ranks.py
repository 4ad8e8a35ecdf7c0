"""Connects the processes that train one model, so that they agree and end at the same batch.

The processes that train one model together, and how they agree about its checkpoints. They agree at
the start of training, when a checkpoint is due, and at the end. They exchange a few integers over a
separate process group on the CPU, whatever training itself uses. Between two checkpoints nothing is
exchanged. Every exchange has a time-out; after it, an error names the ranks that did not answer, so
that a lost rank cannot hold up the others for ever.
"""

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


_log = logging.getLogger("recpoint")

_POLL_SECONDS: Final = 0.5
#: How long a failed exchange waits for the other ranks to report that they are alive.
_ROLL_CALL_SECONDS: Final = 5.0

#: Subjects of exchanges.
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
_HEADER: Final = 3  # occasion, batches done or -1, number of integers that follow

#: The most integers in one exchange. All exchanges have the same length, so that ranks can detect
#: that they are at different exchanges: gloo ends a process whose neighbours send another length.
_MOST: Final = 48
#: Stands for a group that was closed after an error. None would mean a single process.
_DISCONNECTED: Final = object()


class Ranks:
    """The ranks of this job, and their exchanges. In a single process, no method communicates.

    Every method is collective (all ranks call it, in the same order), except `announce`,
    `announced`, `watch`, `meet` and `close`.

    Args:
        wait_seconds: the longest time that a rank may be behind the others in an exchange.

    Attributes:
        rank: rank of this process.
        count: number of ranks.

    Raises:
        RankLost: a rank did not answer.
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
        # A separate group, so that no exchange meets a collective of training; on the CPU, so that
        # no exchange waits for a GPU.
        timeout = timedelta(seconds=self._wait_seconds)
        with self._answered():  # because the ranks connect here
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # The store can be older than this process, because torchrun keeps it over restarts. Keys
        # that an earlier start left there must not count now, so each start has its own prefix.
        life = self.exchange("what each rank has", [secrets.randbits(62)])[0][0]
        self._store = dist.distributed_c10d.PrefixStore(f"recpoint/{life:x}", default)

    @property
    def several(self) -> bool:
        """Whether the job has more than one rank."""
        return self.count > 1

    def exchange(
        self, about: Occasion, values: Sequence[int], *, batches_done: int = -1
    ) -> list[list[int]]:
        """Return the values of each rank, in rank order.

        Args:
            about: subject of the exchange, the same on all ranks.
            values: at most 48 integers of 64 bits; equally many on each rank.
            batches_done: batches done, the same on all ranks; -1: not checked.

        Raises:
            SettingsError: ranks are at different exchanges, or have done different batches.
            RankLost: a rank did not answer.
        """
        if self._group is None:
            return [list(values)]
        assert len(values) <= _MOST
        header = [_OCCASIONS.index(about), batches_done, len(values)]
        # The CPU is named, because a script may have set another default device.
        own_tensor = torch.zeros(_HEADER + _MOST, dtype=torch.int64, device="cpu")
        own_tensor[: _HEADER + len(values)] = torch.tensor(
            [*header, *map(int, values)], dtype=torch.int64, device="cpu"
        )
        gathered = [torch.empty_like(own_tensor) for _ in range(self.count)]
        with self._answered():
            dist.all_gather(gathered, own_tensor, group=self._group)
        answers = [tensor.tolist() for tensor in gathered]
        if any(answer[:_HEADER] != header for answer in answers):
            raise _out_of_step(answers)
        return [answer[_HEADER : _HEADER + len(values)] for answer in answers]

    def gather(self, value: Any) -> list[Any]:
        """Return `value` of each rank, in rank order; for plain objects, outside stalls only."""
        if self._group is None:
            return [value]
        data = pickle.dumps(value)
        sizes = [size for (size,) in self.exchange("what each rank has", [len(data)])]
        padded = bytearray(data.ljust(max(sizes), b"\0"))
        own_tensor = torch.from_numpy(np.frombuffer(padded, dtype=np.uint8))  # always on the CPU
        gathered = [torch.empty_like(own_tensor) for _ in range(self.count)]
        with self._answered():
            dist.all_gather(gathered, own_tensor, group=self._group)
        # Safe to unpickle: the data come from processes of this job, which run the same code.
        return [
            pickle.loads(tensor.numpy().tobytes()[:size])
            for tensor, size in zip(gathered, sizes, strict=True)
        ]

    def first(self, value: Any = None) -> Any:
        """Return the value of rank 0; the values of other ranks are ignored."""
        return self.gather(value if self.rank == 0 else None)[0]

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Go on only if no rank has an error.

        Args:
            error: error of this rank; None: it has none.
            doing: what the ranks were doing, for the message.

        Raises:
            BaseException: `error` itself, on a rank that has one.
            RankLost: another rank has an error; the message names the ranks that do.
        """
        if self._group is not None:
            answers = self.exchange("whether all can go on", [error is not None])
            failed = [rank for rank, (bad,) in enumerate(answers) if bad]
            if failed and error is None:
                raise self._lost(failed, f"an error while {doing}; see their logs")
            if error is not None:
                error.add_note(f"on rank {self.rank} of {self.count}")
        if error is not None:
            raise error

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block on each rank, and go on only if it succeeded on all ranks.

        For work between two exchanges: if a rank failed there, the others would wait for it in the
        next exchange. Any error counts, because any error ends this rank's work.

        Args:
            doing: what the block does, for the message.

        Raises:
            BaseException, RankLost: as `agree` raises them, on all ranks.
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
        """Close the connections, so that ranks which wait for this rank notice the failure.

        Only then can those ranks report that they are alive. Of four ranks in a ring, one always
        waits for a rank that is alive, and not for the lost one.
        """
        group, self._group = self._group, _DISCONNECTED
        if group is not None:
            with contextlib.suppress(ValueError):  # as in close
                dist.destroy_process_group(group)
        del group
        # Connections close with the last reference to the group; frames of failed calls hold some.
        traceback.clear_frames(error.__traceback__)

    def _missing(self) -> list[int]:
        """Return the ranks that do not report that they are alive; empty if that is unknown."""
        missing_ranks: list[list[int]] = []
        # In a thread: the rank that keeps the store may be the one that hangs, and a call to the
        # store then takes minutes to return.
        call = threading.Thread(target=self._call_roll, args=(missing_ranks,), daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # Python's "can't start new thread"
            call.start()
            call.join(2 * _ROLL_CALL_SECONDS)
        if missing_ranks:
            return missing_ranks[0]
        # The store hangs or is gone, or no thread could ask it. Of two ranks, the other is lost.
        return [1 - self.rank] if self.count == 2 else []

    def _call_roll(self, missing_ranks: list[list[int]]) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"alive/{self._number}/{self.rank}", b"1")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            missing = list(range(self.count))
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._is_alive(rank)]
                time.sleep(0.05)
            missing_ranks.append(missing)

    def _is_alive(self, rank: int) -> bool:
        # An exchange can succeed on some ranks only; these notice the failure in the next exchange.
        near = range(self._number - 1, self._number + 2)
        return any(self._store.check([f"alive/{number}/{rank}"]) for number in near)

    def _lost(self, ranks: list[int], found: str) -> RankLost:
        lost_ranks = ", ".join(map(str, ranks)) if ranks else "one or more (unknown which)"
        return RankLost(
            f"rank {lost_ranks} of {self.count}",
            found=found,
            expected=f"every rank within {self._wait_seconds:g} s",
            next_step="see the log of that rank; start the job again: it goes on from its last "
            "checkpoint",
        )

    def watch(self) -> None:
        """Notice from now on if any rank announces that it must end; not collective."""
        if self._group is None or self._watch is not None:
            return
        watch = threading.Thread(target=self._watch_for_end, name="recpoint-ranks", daemon=True)
        watch.start()
        self._watch = watch
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # As in `Handoff`: if Python ends a daemon thread inside torch, the process aborts.
        if os.getpid() == self._process:
            self._end_watch()

    def _end_watch(self) -> None:
        atexit.unregister(self._at_exit)
        self._ended.set()
        if self._watch is not None:
            self._watch.join(_ROLL_CALL_SECONDS)  # limited, because the store may hang
            self._watch = None

    def _watch_for_end(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                if self._store.check(["end"]):
                    self._announced = "end"
                    return
            except RuntimeError as error:
                # If ranks are lost together with the store, the next exchange reports it.
                _log.info("this rank no longer hears of a SIGTERM to another rank: %s", error)
                return

    def announce(self) -> None:
        """Announce that this rank must end, and thereby all ranks; not collective."""
        if self._group is not None and self._announced is None:
            self._announced = "end"
            with contextlib.suppress(RuntimeError):
                self._store.set("end", b"1")

    @property
    def announced(self) -> bool:
        """Whether a rank has announced that it must end; not collective, and costs nothing."""
        return self._announced is not None

    def meet(self, batches_done: int) -> int | None:
        """Return the batch after which all ranks stop together; waits for no rank.

        Each rank calls it after each batch, as soon as it knows that it must end. Ranks train
        together, so no rank begins a batch before all others have begun the batch before. Therefore
        every rank can still stop after the batch that follows the latest one at which a rank
        learned of the end.

        Returns:
            The batch to stop after; None: some ranks do not know of the end yet.
        """
        if self._group is None:
            return batches_done
        with contextlib.suppress(RuntimeError):
            own_key = f"at/{self.rank}"
            if not self._store.check([own_key]):
                self._store.set(own_key, str(batches_done))
            keys = [f"at/{rank}" for rank in range(self.count)]
            if self._store.check(keys):
                return max(int(self._store.get(key)) for key in keys) + 1
        return None

    def close(self) -> None:
        """Leave the group; not collective."""
        self._end_watch()
        group, self._group = self._group, None
        if group not in (None, _DISCONNECTED) and dist.is_initialized():
            # ValueError: the job has already destroyed all groups and made new ones.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def _out_of_step(answers: Sequence[Sequence[int]]) -> SettingsError:
    """Return the error for ranks that came to one exchange with different headers."""
    positions = []
    for rank, (about, batches_done, *_) in enumerate(answers):
        after_batch = f" after batch {batches_done}" if batches_done >= 0 else ""
        positions.append(f"rank {rank} at {_OCCASIONS[about]}{after_batch}")
    return SettingsError(
        "ranks",
        found=", ".join(positions),
        expected="the same on all ranks",
        next_step="call step() after every batch on each rank, and restore(), checkpoint() and "
        "close() on all ranks after the same batch",
    )


class AgreedEnd:
    """Decides whether this process must end, and after which batch.

    Args:
        ranks: the ranks of the job; a rank that got SIGTERM tells the others.
        wait_seconds: how long the ranks may take to find a batch that none has passed.
    """

    def __init__(self, ranks: Ranks, *, wait_seconds: float) -> None:
        self._ranks = ranks
        self._wait_seconds = wait_seconds
        self._notice = TerminationNotice()
        self._ends_by: float | None = None  # monotonic seconds
        self._over = False
        self._batches_before: int | None = None  # at the last call of `end_if_last`

    def watch(self) -> None:
        """Handle SIGTERM from now on, and notice a SIGTERM to other ranks."""
        self._notice.install()
        self._ranks.watch()

    @property
    def is_due(self) -> bool:
        """Whether this process must end; `end_if_last` decides after which batch."""
        # Only once: a handler of the user may let training go on.
        return not self._over and (self._notice.requested or self._ranks.announced)

    @property
    def is_done(self) -> bool:
        """Whether `end_if_last` has finished and the signal has not been passed on yet."""
        return self._over and not self._notice.redelivered

    def end_if_last(self, batches_done: int, finish: Callable[[int], None]) -> None:
        """Take the last checkpoint if all ranks stop after this batch.

        Called after batches once the process must end, after the same ones on all ranks: with
        accumulated gradients, only after those that have a step.

        Args:
            batches_done: batches so far.
            finish: takes the last checkpoint; called with `batches_done`.
        """
        self._ranks.announce()
        last = self._ranks.meet(batches_done)
        now = time.monotonic()
        if self._ends_by is None:
            self._ends_by = now + self._wait_seconds
        late = now > self._ends_by  # never at the first call, when others cannot have answered yet
        last_batches, self._batches_before = self._batches_before, batches_done
        if not late and (last is None or batches_done < last):
            return  # other ranks have not noticed yet, and train one or two more batches
        if last is not None and (batches_done == last or (last_batches or 0) < last < batches_done):
            _log.warning("SIGTERM at batch %d: taking a final checkpoint", batches_done)
            finish(batches_done)
        else:
            _log.error(
                "SIGTERM at batch %d: no final checkpoint, because the ranks found no common batch "
                "to stop at. Next: nothing; a restart goes on from the newest checkpoint",
                batches_done,
            )
        self._over = True

    def hand_on(self) -> None:
        """Pass the signal on to the earlier handler; the default handler ends the process."""
        self._notice.redeliver()

    def close(self) -> None:
        """Put the earlier handler back, and pass on a signal that nobody has acted on."""
        if self._notice.requested or self.is_done:
            self.hand_on()
        self._notice.remove()

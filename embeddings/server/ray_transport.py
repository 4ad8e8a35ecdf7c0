"""Holds an embedding server in a Ray actor, and passes the seven calls on to it as actor calls.

The actor may listen for TCP as well, which takes a third of the time and of the CPU (decision 46).

Arguments and results are numpy arrays. Ray moves one of more than 100 KB through the object store
of each machine: it is copied in once, and is mapped read-only where it arrives. Smaller ones travel
in the call itself.

Ray repeats no call (`max_task_retries=0`), because it would do so in any order.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import ray
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer
from recpoint.embeddings.server.tcp_peer import reach_with
from recpoint.embeddings.server.transport import Greeting, Transport, Value
from recpoint.errors import RecpointError, ServerLost

__all__ = ["CALLS_AT_ONCE", "MOST_CALLS_WAITING", "RayTransport", "ServerActor", "actor_options"]

_LOG: Final = logging.getLogger("recpoint")

_Array = np.ndarray[Any, Any]

#: Threads of an actor, each of which answers one call.
CALLS_AT_ONCE: Final = 4
#: Calls of one transport that have no answer yet. Others wait in the trainer until there is room.
MOST_CALLS_WAITING: Final = 16
#: Ray's own bound for each handle of an actor. Calls that were given up count until they are done.
_MOST_CALLS_IN_RAY: Final = 2 * MOST_CALLS_WAITING
_POLL_SECONDS: Final = 0.05


class ServerActor:
    """An embedding server as an actor: takes and returns numpy arrays. Runs in a Ray worker.

    Args:
        name: what errors call the server.
        token: what callers over TCP know; None: the server answers actor calls only.
        timeout_seconds: how long a call to another server may take.
    """

    def __init__(
        self, name: str, token: bytes | None = None, timeout_seconds: float = 60.0
    ) -> None:
        # Arrays of the object store are read-only. The server copies what it is given, and writes
        # to none of it. This process has no other work than the server's.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        reach = None if token is None else reach_with(token, timeout_seconds=timeout_seconds)
        self._server = EmbeddingServer(name=name, reach=reach)
        self._listening: TcpServer | None = None
        if token is not None:
            # The address by which nodes of the cluster reach each other.
            self._listening = TcpServer(self._server, token, host=ray.util.get_node_ip_address())

    def address(self) -> tuple[str, int]:
        """Return where the server listens for TCP; it needs a token."""
        assert self._listening is not None
        return self._listening.address

    def hello(self) -> Greeting:
        """See `Transport`."""
        return self._server.hello()

    def command(
        self, name: str, arguments: Mapping[str, Value], incarnation: int
    ) -> Mapping[str, Value]:
        """See `Transport`."""
        return self._server.command(name, arguments, incarnation=incarnation)

    def fetch(
        self,
        wanted: Sequence[tuple[str, _Array, int]],
        incarnation: int,
        frozen: int | None,
    ) -> list[tuple[_Array, _Array]]:
        """Read records.

        Args:
            wanted: for each table its name, slots, int64 [n], and the bytes of a record.
            incarnation: of the server that is meant.
            frozen: as for `Transport.fetch`.

        Returns:
            For each table bool [n], whether the server has the row, and the records that it has,
            uint8 [m, record_bytes].
        """
        # Takes no memory before records are written, which is after the server has checked sizes.
        rows = [
            TableRows(
                table,
                torch.from_numpy(slots),
                torch.empty(len(slots), record_bytes, dtype=torch.uint8, device="cpu"),
            )
            for table, slots, record_bytes in wanted
        ]
        found = self._server.fetch(rows, incarnation=incarnation, frozen=frozen)
        there = ((one.records.numpy(), has.numpy()) for one, has in zip(rows, found, strict=True))
        return [(has, records if has.all() else records[has]) for records, has in there]

    def write_back(
        self,
        changed: Sequence[tuple[str, _Array, _Array]],
        incarnation: int,
        trainer: int,
        batch: int,
    ) -> None:
        """Store records: for each table its name, int64 [n] and uint8 [n, record_bytes].

        See `Transport`.
        """
        rows = [
            TableRows(table, torch.from_numpy(slots), torch.from_numpy(records))
            for table, slots, records in changed
        ]
        self._server.write_back(rows, incarnation=incarnation, trainer=trainer, batch=batch)

    def check(self, table: str, slots: _Array, incarnation: int) -> _Array:
        """Compare stripes: int64 [n] slots to uint8 [n]. See `Transport`."""
        return self._server.check(table, torch.from_numpy(slots), incarnation=incarnation).numpy()

    def stage(
        self, frozen: int, slots: _Array, records: _Array | None, incarnation: int, first: int
    ) -> _Array:
        """Stage rows: int64 [n] slots, and uint8 [n, bytes] or None, to bool [n].

        See `Transport`.
        """
        return self._server.stage(
            frozen,
            torch.from_numpy(slots),
            None if records is None else torch.from_numpy(records),
            incarnation=incarnation,
            first=first,
        ).numpy()


class RayTransport(Transport):
    """Calls an embedding server that is a Ray actor.

    Args:
        actor: handle of a `ServerActor`.
        name: what errors call the server.
        timeout_seconds: the longest time that a call may take, with its wait for room.
    """

    def __init__(self, actor: Any, *, name: str, timeout_seconds: float = 60.0) -> None:
        self._actor = actor
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._room = threading.BoundedSemaphore(MOST_CALLS_WAITING)
        self._is_closed = False

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        """Ask the server who it is. Waits for one that Ray is starting again."""
        greeting = self._ask_until_started("hello", within_seconds)
        assert isinstance(greeting, Greeting)
        return greeting

    def address(self) -> tuple[str, int]:
        """Ask where the server listens for TCP. Waits for one that Ray is starting again.

        Raises:
            ServerLost: as for the calls of `Transport`.
        """
        host, port = self._ask_until_started("address")
        return str(host), int(port)

    def end_if_hanging(self, seconds: float) -> None:
        """Have Ray start the actor again if its process lives and answers nothing.

        Args:
            seconds: how long to wait for an answer.
        """
        try:
            self._ask("hello", deadline=time.monotonic() + seconds)
        except ServerLost as error:
            # If Ray knows that the process has ended, it says so earlier, and starts another one.
            if isinstance(error.__cause__, ray.exceptions.GetTimeoutError):
                _LOG.warning("%s: its process does not answer; Ray starts another one", self._name)
                ray.kill(self._actor, no_restart=False)

    def _ask_until_started(self, method: str, within_seconds: float | None = None) -> Any:
        deadline = time.monotonic() + (within_seconds or self._timeout_seconds)
        while True:
            try:
                return self._ask(method, deadline=deadline)
            except ServerLost as error:
                starts_again = isinstance(error.__cause__, ray.exceptions.ActorUnavailableError)
                if not starts_again or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def command(
        self, name: str, arguments: Mapping[str, Value], *, incarnation: int
    ) -> Mapping[str, Value]:
        """See `Transport`."""
        answer = self._ask("command", name, dict(arguments), incarnation)
        assert isinstance(answer, dict)
        return answer

    def fetch(
        self, wanted: Sequence[TableRows], *, incarnation: int, frozen: int | None = None
    ) -> list[Tensor]:
        """See `Transport`."""
        asked = [(one.table, one.ids.numpy(), one.records.shape[1]) for one in wanted]
        answers = self._ask("fetch", asked, incarnation, frozen)
        found = []
        for one, (has, records) in zip(wanted, answers, strict=True):
            # What comes from the object store is read-only, and stays there only until it is
            # dropped.
            if len(records) == len(one.ids):
                np.copyto(one.records.numpy(), records)
            else:
                one.records.numpy()[has] = records
            found.append(torch.from_numpy(has.copy()))
        return found

    def write_back(
        self, changed: Sequence[TableRows], *, incarnation: int, trainer: int, batch: int
    ) -> None:
        """See `Transport`."""
        # Contiguous arrays are copied once, straight from their memory.
        rows = [
            (one.table, one.ids.contiguous().numpy(), one.records.contiguous().numpy())
            for one in changed
        ]
        self._ask("write_back", rows, incarnation, trainer, batch)

    def check(self, table: str, slots: Tensor, *, incarnation: int) -> Tensor:
        """See `Transport`."""
        return torch.from_numpy(self._ask("check", table, slots.numpy(), incarnation).copy())

    def stage(
        self,
        frozen: int,
        slots: Tensor,
        records: Tensor | None = None,
        *,
        incarnation: int,
        first: int = 0,
    ) -> Tensor:
        """See `Transport`."""
        sent = None if records is None else records.contiguous().numpy()
        found = self._ask("stage", frozen, slots.contiguous().numpy(), sent, incarnation, first)
        return torch.from_numpy(found.copy())

    def close(self) -> None:
        """Forget the actor. It goes on."""
        self._is_closed = True

    def _ask(self, method: str, *arguments: object, deadline: float | None = None) -> Any:
        """Call the actor, and wait for its answer.

        Raises:
            ServerLost: there is none in time, or there will never be one.
            RecpointError, ValueError: as the server raised it.
        """
        if deadline is None:
            deadline = time.monotonic() + self._timeout_seconds
        # Without a cluster, Ray would start one of its own.
        if self._is_closed or not ray.is_initialized():
            raise self._lost("a call after this process has left the Ray cluster")
        if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._lost(
                f"{MOST_CALLS_WAITING} calls without an answer for {self._timeout_seconds:g} s"
            )
        try:
            answer = getattr(self._actor, method).remote(*arguments)
            return ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayTaskError as error:
            # The server raised it, unless Ray did so in the server's process.
            if isinstance(error.cause, (RecpointError, ValueError)):
                raise error.cause from None
            raise self._lost(f"an error in its process: {error.cause!r}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise self._lost(f"no answer for {self._timeout_seconds:g} s") from error
        except ray.exceptions.PendingCallsLimitExceeded as error:
            raise self._lost(f"{_MOST_CALLS_IN_RAY} calls that have no answer") from error
        except ray.exceptions.RayError as error:
            raise self._lost(f"{type(error).__name__}: {_first_line(error)}") from error
        finally:
            self._room.release()

    def _lost(self, found: str) -> ServerLost:
        return ServerLost(
            self._name,
            found=found,
            expected=f"an answer within {self._timeout_seconds:g} s",
            next_step="see `ray list actors` and `ray status`; then restore the last checkpoint",
        )


def actor_options() -> dict[str, Any]:
    """Return the options of Ray that every actor of a server has."""
    return {
        # A server waits most of the time, and a machine with one core has room for several.
        "num_cpus": 0,
        "max_concurrency": CALLS_AT_ONCE,
        "max_pending_calls": _MOST_CALLS_IN_RAY,
        # A server that was started again has no rows, and says so by its incarnation.
        "max_restarts": -1,
        "max_task_retries": 0,
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no more is known"

"""Holds an embedding server in a Ray actor, and passes messages on to it as actor calls.

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
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
import ray
import torch

from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer
from recpoint.embeddings.server.tcp_peer import reach_with
from recpoint.embeddings.server.transport import (
    Greet,
    Message,
    RecordUse,
    Reply,
    RowMessage,
    SlotRows,
    Transport,
)
from recpoint.errors import RecpointError, ServerLost
from recpoint.format.records import Part

__all__ = ["CALLS_AT_ONCE", "MOST_CALLS_WAITING", "RayTransport", "ServerActor", "actor_options"]

_LOG: Final = logging.getLogger("recpoint")

AnswerT = TypeVar("AnswerT", bound=Part)

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

    def call(
        self, message: Message[Any], slots: Sequence[_Array], records: Sequence[_Array | int]
    ) -> tuple[Part, list[_Array]]:
        """Answer a message.

        Args:
            message: says what is wanted.
            slots: for each `SlotRows` of the message int64 [n].
            records: for each of them uint8 [n, record_bytes]; or, for `RecordUse.FILLED`,
                record_bytes; empty for `RecordUse.NONE`.

        Returns:
            The answer, and the tensors of the reply. For `RecordUse.FILLED` the records that the
            server has, uint8 [m, record_bytes], follow for each `SlotRows`.
        """
        ids = [torch.from_numpy(part) for part in slots]
        if not records:
            reply = self._server.call(message, [SlotRows(part) for part in ids])
            return reply.answer, [tensor.numpy() for tensor in reply.tensors]
        # Takes no memory before records are written, which is after the server has checked sizes.
        rows = [
            SlotRows(
                part,
                torch.empty(len(part), of_part, dtype=torch.uint8, device="cpu")
                if isinstance(of_part, int)
                else torch.from_numpy(of_part),
            )
            for part, of_part in zip(ids, records, strict=True)
        ]
        reply = self._server.call(message, rows)
        tensors = [tensor.numpy() for tensor in reply.tensors]
        if not _is_filled(message):
            return reply.answer, tensors
        filled = [row_part.records.numpy() for row_part in rows if row_part.records is not None]
        present = [
            part if is_present.all() else part[is_present]
            for part, is_present in zip(filled, tensors, strict=True)
        ]
        return reply.answer, [*tensors, *present]


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

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        """See `Transport`. `Greet` waits for a server that Ray is starting again."""
        is_filled = _is_filled(message)
        # Contiguous arrays are copied once, straight from their memory.
        slots = [row_part.slots.contiguous().numpy() for row_part in rows]
        records = [
            row_part.records.shape[1] if is_filled else row_part.records.contiguous().numpy()
            for row_part in rows
            if row_part.records is not None
        ]
        arguments = message, slots, records
        if isinstance(message, Greet):
            answered = self._ask_until_started("call", *arguments, within_seconds=within_seconds)
        else:
            seconds = self._timeout_seconds if within_seconds is None else within_seconds
            answered = self._ask("call", *arguments, deadline=time.monotonic() + seconds)
        answer, arrays = answered
        if not is_filled:
            # What comes from the object store is read-only, and stays there only until it is
            # dropped.
            return Reply(answer, [torch.from_numpy(array.copy()) for array in arrays])
        has_rows, present = arrays[: len(rows)], arrays[len(rows) :]
        for row_part, is_present, part in zip(rows, has_rows, present, strict=True):
            assert row_part.records is not None
            if len(part) == len(row_part.slots):
                np.copyto(row_part.records.numpy(), part)
            else:
                row_part.records.numpy()[is_present] = part
        return Reply(answer, [torch.from_numpy(is_present.copy()) for is_present in has_rows])

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
            self._ask("call", Greet(), [], [], deadline=time.monotonic() + seconds)
        except ServerLost as error:
            # If Ray knows that the process has ended, it says so earlier, and starts another one.
            if isinstance(error.__cause__, ray.exceptions.GetTimeoutError):
                _LOG.warning("%s: its process does not answer; Ray starts another one", self._name)
                ray.kill(self._actor, no_restart=False)

    def _ask_until_started(
        self, method: str, *arguments: object, within_seconds: float | None = None
    ) -> Any:
        deadline = time.monotonic() + (within_seconds or self._timeout_seconds)
        while True:
            try:
                return self._ask(method, *arguments, deadline=deadline)
            except ServerLost as error:
                starts_again = isinstance(error.__cause__, ray.exceptions.ActorUnavailableError)
                if not starts_again or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Forget the actor. It goes on."""
        self._is_closed = True

    def _ask(self, method: str, *arguments: object, deadline: float) -> Any:
        """Call the actor, and wait for its answer.

        Raises:
            ServerLost: there is none in time, or there will never be one.
            RecpointError, ValueError: as the server raised it.
        """
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


def _is_filled(message: Message[Any]) -> bool:
    return isinstance(message, RowMessage) and message.records is RecordUse.FILLED


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no more is known"

"""Watches the head of a Ray cluster, without which Ray ends this process.

Rows go over TCP, so training goes on for a while after the head has gone. Ray waits for the head to
come back, and then ends the process without an exception: no `finally` runs, and what Ray prints
says nothing of checkpoints. So calls to servers raise `ClusterLost` some seconds before.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from recpoint.embeddings.server.transport import Message, Reply, SlotRows, Transport
from recpoint.errors import ClusterLost, ServerLost
from recpoint.format.records import Part

__all__ = ["BEFORE_RAY_SECONDS", "Head", "WatchedTransport", "patience_of_ray"]

AnswerT = TypeVar("AnswerT", bound=Part)

_LOG: Final = logging.getLogger("recpoint")
_LOOK_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 2.0
#: How long before Ray this process gives the head up: to leave the cluster takes five seconds.
BEFORE_RAY_SECONDS: Final = 15.0
_NEXT_STEP: Final = (
    "start a Ray cluster, and start training again: it goes on from its newest checkpoint"
)


def patience_of_ray() -> float:
    """Return for how many seconds Ray waits for a head that has gone."""
    try:
        return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", ""))
    except ValueError:
        return 60.0


class Head:
    """The head of the cluster that this process is connected to. All calls are thread-safe.

    Args:
        address: HOST:PORT.
        seconds: how long the head may be away: then `give_up` is called, and `require_kept` raises.
        give_up: leaves the cluster.
    """

    def __init__(self, address: str, *, seconds: float, give_up: Callable[[], None]) -> None:
        self._address = address
        self._seconds = seconds
        self._give_up = give_up
        self._is_lost = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="recpoint-ray-head", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more, and wait for a look or a leave that is under way."""
        self._is_over.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the head answers: a call to Ray would wait for one that is away, for ever.

        Raises:
            ClusterLost: the head was away too long.
            ServerLost: `stop` was called meanwhile.
        """
        while not self._answers():
            self.require_kept()
            if self._is_over.wait(_LOOK_SECONDS):
                self.require_kept()
                raise ServerLost(
                    self._name,
                    found="no answer, and a home that is closed",
                    expected="the head, which knows where servers are",
                    next_step=_NEXT_STEP,
                )

    def require_kept(self) -> None:
        """Refuse calls once the head was away too long.

        Raises:
            ClusterLost: it was.
        """
        if self._is_lost:
            raise ClusterLost(
                self._name,
                found=f"no answer for {self._seconds:g} s",
                expected="the head, without which Ray ends this process and its servers",
                next_step=_NEXT_STEP,
            )

    @property
    def _name(self) -> str:
        return f"the head of the Ray cluster at {self._address}"

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        gone_at: float | None = None
        was_told = False
        while not self._is_over.wait(_LOOK_SECONDS):
            if self._answers():
                if was_told:
                    _LOG.warning("%s answers again", self._name)
                gone_at, was_told = None, False
                continue
            now = time.monotonic()
            if gone_at is None:
                gone_at = now  # one look may miss a head that is busy
                continue
            if not was_told:
                was_told = True
                _LOG.warning(
                    "%s does not answer; training goes on for %.0f s, and ends if the head does "
                    "not come back",
                    self._name,
                    self._seconds,
                )
            if now - gone_at >= self._seconds:
                self._is_lost = True
                self._is_over.set()
                self._give_up()


class WatchedTransport(Transport):
    """Calls a server as another transport does, until the head was away too long.

    Args:
        transport: the other transport.
        head: of the server's cluster.

    Raises:
        ClusterLost: from all calls, once the head was away too long.
    """

    def __init__(self, transport: Transport, head: Head) -> None:
        self._transport = transport
        self._head = head
        self.listens_at = transport.listens_at

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        """See `Transport`."""
        self._head.require_kept()
        try:
            return self._transport.call(message, rows, within_seconds=within_seconds)
        except ServerLost:
            self._head.require_kept()  # meanwhile: this says why
            raise

    def close(self) -> None:
        """See `Transport`."""
        self._transport.close()

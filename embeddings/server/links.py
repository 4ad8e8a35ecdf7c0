"""Keeps a link to each embedding server of a training, and calls all of them at the same time."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

from recpoint.embeddings.server.transport import Greeting, Transport
from recpoint.errors import ServerLost

__all__ = ["ServerLink", "ServerLinks"]

T = TypeVar("T")

#: Threads for each server: as many callers as a cache has.
_CALLS_AT_ONCE: Final = 4
_MOST_THREADS: Final = 64


class ServerLink:
    """One server. `lock` is held while its transport or incarnation is renewed.

    `numbers` are those of writes, freezes and clears; they never begin anew.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.numbers = itertools.count(1)
        self.incarnation = 0
        self.greeting: Greeting | None = None
        self.lock = threading.Lock()


class ServerLinks:
    """The servers of a training, as one of its trainers calls them.

    Args:
        transports: one for each server, in the order of the servers.
        owner: number of the training that the servers work for; None: this object draws one, and
            `begin_all` takes the servers over.
        trainer: number of this trainer among those with the same owner.
        trainers: how many these are.
        revive: called with the number of a server that does not answer. Returns a transport to the
            server that is there instead. None: there is none.

    Attributes:
        owner: number of the training that the servers work for.
        trainer, trainers, revive: as given.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        owner: int | None,
        trainer: int,
        trainers: int,
        revive: Callable[[int], Transport] | None,
    ) -> None:
        if not transports:
            raise ValueError("transports: none, expected one for each server")
        self._takes_over = owner is None
        self.owner = secrets.randbelow((1 << 63) - 1) + 1 if owner is None else owner
        self.trainer = trainer
        self.trainers = trainers
        self.revive = revive
        self._links = [ServerLink(transport) for transport in transports]
        self._threads = ThreadPoolExecutor(
            min(_MOST_THREADS, _CALLS_AT_ONCE * len(transports)),
            thread_name_prefix="recpoint-servers",
        )

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, number: int) -> ServerLink:
        return self._links[number]

    def __iter__(self) -> Iterator[ServerLink]:
        return iter(self._links)

    @property
    def greetings(self) -> tuple[Greeting, ...]:
        """The answers of the servers to `hello` when this trainer began to use them."""
        return tuple(link.greeting for link in self if link.greeting is not None)

    def at_all(self, act: Callable[[int], T]) -> list[T]:
        """Call `act` with each server's number, at the same time; return what it returned.

        Raises:
            Exception: what the first server's call raised, once all calls have ended.
        """
        last = len(self._links) - 1
        calls = [self._threads.submit(act, number) for number in range(last)]
        try:
            last_result = act(last)
        finally:
            wait(calls)
        return [*(call.result() for call in calls), last_result]

    def begin_all(self, begin: Callable[[ServerLink, Greeting], int]) -> None:
        """Have all servers work for this training; see `begin`."""
        self.at_all(lambda number: self._begin(number, begin, takes_over=self._takes_over))

    def begin(self, number: int, begin: Callable[[ServerLink, Greeting], int]) -> int:
        """Learn the incarnation that a server has now, and have it work for this training.

        Args:
            number: of the server.
            begin: has a server that works for no training begin; returns its incarnation.

        Raises:
            ServerLost: it does not answer, or works for another training.
        """
        return self._begin(number, begin, takes_over=False)

    def _begin(
        self, number: int, begin: Callable[[ServerLink, Greeting], int], *, takes_over: bool
    ) -> int:
        link = self._links[number]
        with link.lock:
            try:
                greeting = link.transport.hello()
            except ServerLost:
                if self.revive is None:
                    raise
                revived = self.revive(number)  # if it raises, this is tried again
                lost, link.transport = link.transport, revived
                lost.close()
                greeting = link.transport.hello()
            link.incarnation, link.greeting = greeting.incarnation, greeting
            if greeting.owner != self.owner:
                if greeting.owner and not takes_over:
                    raise ServerLost(
                        f"embedding server {number + 1} of {len(self._links)}"
                        f" (pid {greeting.pid} on {greeting.host})",
                        found="a server that another training has taken over",
                        expected="a server that works for this training",
                        next_step="end the training that is not wanted, and start the other again",
                    )
                link.incarnation = begin(link, greeting)
            return link.incarnation

    def end(self) -> None:
        """End all calls, and close the transports."""
        self._threads.shutdown(wait=True)
        self.close()

    def close(self) -> None:
        """Close the transports."""
        for link in self._links:
            link.transport.close()

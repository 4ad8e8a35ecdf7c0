"""Makes a home of embedding servers, with parity or without.

With parity, the loss of a server stops nobody; see `UntilSuccessor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.transport import Transport
from recpoint.embeddings.server.until_successor import UntilSuccessor
from recpoint.errors import SettingsError

__all__ = ["made_home", "protected_home"]


def made_home(
    transports: Sequence[Transport],
    *,
    parity: Parity | None,
    timeout_seconds: float,
    revive: Callable[[int], Transport],
    hosts: Sequence[str] | None = None,
    owner: int | None = None,
    at_close: Callable[[], None] | None = None,
) -> ServedHome:
    """Make this rank's home of servers, with parity or without; see `protected_home`."""
    rank, ranks = rank_and_count()
    if parity is None:
        return ServedHome(
            transports,
            owner=owner,
            trainer=rank,
            trainers=ranks,
            revive=revive,
            at_close=at_close,
        )
    return protected_home(
        transports,
        parity=parity,
        hosts=hosts,
        owner=owner,
        trainer=rank,
        trainers=ranks,
        revive=revive,
        at_close=at_close,
        timeout_seconds=timeout_seconds,
    )


def protected_home(
    transports: Sequence[Transport],
    *,
    parity: Parity,
    hosts: Sequence[str] | None = None,
    owner: int | None = None,
    trainer: int = 0,
    trainers: int = 1,
    revive: Callable[[int], Transport] | None = None,
    at_close: Callable[[], None] | None = None,
    timeout_seconds: float = 60.0,
    patience_seconds: float | None = None,
) -> ServedHome:
    """Make a home whose rows are on embedding servers that keep parity.

    Args:
        transports: one for each server, in the order of the servers; each has an address. The home
            closes them, also if it cannot be made.
        parity, hosts, timeout_seconds, patience_seconds: see `UntilSuccessor`.
        owner, trainer, trainers, revive, at_close: see `ServedHome`.

    Raises:
        ServerLost: a server does not answer, or works for another training.
        SettingsError: there are fewer servers than a stripe needs.
    """
    try:
        parity.require_servers(len(transports))
    except SettingsError:
        for transport in transports:
            transport.close()
        raise
    return ServedHome(
        transports,
        owner=owner,
        trainer=trainer,
        trainers=trainers,
        revive=revive,
        at_close=at_close,
        policy=partial(
            UntilSuccessor,
            parity=parity,
            hosts=hosts,
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
        ),
    )

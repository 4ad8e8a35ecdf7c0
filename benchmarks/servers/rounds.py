"""Plays peers of one trainer in turns, and measures processor time and bytes of each round."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.servers.network import Node
from benchmarks.servers.nodes import cpu_seconds
from benchmarks.servers.trainers import Played, Trainers

__all__ = ["DELAY_SECONDS", "GBIT", "MOST_CORES", "Round", "Scene"]

#: Bytes a second of a link of 1 Gbit/s, and what a call waits more, as on a longer cable.
GBIT = 1e9 / 8
DELAY_SECONDS = 0.0002
#: Above this share of all cores, processes wait for a core and not only for their links.
MOST_CORES = 0.6


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a peer did in a round.

    Attributes:
        played: by the trainer.
        servers_cpu: seconds.
        up: bytes from the trainer.
        down: bytes to the trainer.
    """

    played: Played
    servers_cpu: float
    up: int
    down: int

    @property
    def seconds(self) -> float:
        """Of the round."""
        return self.played.seconds

    @property
    def net_seconds(self) -> float:
        """What the trainer waited, apart from its steps."""
        return self.played.seconds - self.played.step_seconds

    @property
    def cores(self) -> float:
        """The share of all cores that all roles used."""
        used = self.played.cpu_seconds + self.servers_cpu
        return used / self.seconds / (os.cpu_count() or 1)


class Scene:
    """A trainer's node, and all peers that train on it.

    Args:
        node: the trainer's node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._peers: dict[str, tuple[Trainers, Sequence[int]]] = {}

    def add(self, peers: Iterable[str], trainers: Trainers, servers: Sequence[int]) -> None:
        """Add peers with the processes that train them, and process ids of their servers."""
        self._peers |= dict.fromkeys(peers, (trainers, servers))

    def play(self, peer: str, batches: int, wait: float) -> Round:
        """Play a peer."""
        trainers, servers = self._peers[peer]
        traffic_before, cpu = self._node.traffic(), cpu_seconds(servers)
        (played,) = trainers.play(peer, batches, wait=wait)
        traffic_after = self._node.traffic()
        return Round(
            played=played,
            servers_cpu=cpu_seconds(servers) - cpu,
            up=traffic_after.up - traffic_before.up,
            down=traffic_after.down - traffic_before.down,
        )

    def rounds(self, count: int, batches: int, wait: float) -> dict[str, list[Round]]:
        """Play all peers in turns, so many times."""
        rounds: dict[str, list[Round]] = {name: [] for name in self._peers}
        for number in range(count):
            # Every other round the other way round, so that no peer always follows the same one.
            for name in list(rounds)[:: 1 if number % 2 == 0 else -1]:
                rounds[name].append(self.play(name, batches, wait))
        return rounds

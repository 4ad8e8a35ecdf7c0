"""Checks what a demo is asked to show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recpoint.embeddings.parity.stripes import Parity
from recpoint.errors import SettingsError

__all__ = ["DemoSettings"]

BITS = ("lossless", "8", "4", "3", "2")
MOST_RANKS = 16
MOST_SERVERS = 16


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of a demo.

    Attributes:
        directory: for the run, logs and progress; files of an earlier demo there are removed.
        store: URL below which the run is stored; None: in `directory`.
        steps: batches to train.
        interval: batches between checkpoints.
        bits: "lossless", "8", "4", "3" or "2".
        ranks: processes that train together; torchrun starts them if there are 2 or more.
        lookahead: the trainer reads ahead, so that rows are copied before the stall.
        home: directory for the rows of the trainer that is killed, which has those in use in a
            cache; the other trainer has all rows in memory. None: both have.
        servers: the same with the rows in so many server processes, of which one is killed first.
            With several ranks, these share the rows, and each has a cache.
        keyed: the trainers look raw customers and product codes up by key. Tables have fewer rows
            than there are keys, so rows are evicted.
        parity: "K+R", rows and parity rows of a stripe on these servers: training then goes on when
            one is killed, and goes back to no checkpoint. "": no parity.
    """

    directory: Path
    store: str | None = None
    steps: int = 2000
    interval: int = 200
    bits: str = "lossless"
    ranks: int = 1
    lookahead: bool = False
    home: Path | None = None
    servers: int = 0
    parity: str = ""
    keyed: bool = False

    @property
    def example(self) -> str:
        """Name of the example that trains."""
        if self.servers:
            return "train_with_servers"
        return "train_dlrm" if self.home is None else "train_larger_than_memory"

    @property
    def is_cached(self) -> bool:
        """Whether the trainer that is killed has its tables in a cache."""
        return self.home is not None or self.servers > 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise _refused("--bits", self.bits, f"one of {', '.join(BITS)}")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise _refused("--ranks", str(self.ranks), f"1 to {MOST_RANKS} processes")
        if self.lookahead and self.ranks > 1:
            raise _refused("--lookahead", f"--ranks {self.ranks}", "one process: leave out --ranks")
        if not 0 <= self.servers <= MOST_SERVERS:
            raise _refused("--servers", str(self.servers), f"1 to {MOST_SERVERS} processes")
        if self.parity:
            match = re.fullmatch(r"(\d{1,2})\+(\d)", self.parity)
            if match is None:
                raise _refused("--parity", self.parity, "K+R, such as 4+1")
            Parity(data=int(match[1]), parity=int(match[2])).require_servers(self.servers)
        if self.keyed:
            self._require_plain()
        if self.is_cached and self.lookahead:
            raise _refused(
                "--lookahead",
                "with --home" if self.home is not None else f"with --servers {self.servers}",
                "no --lookahead: a trainer with a cache always reads ahead",
            )
        if self.home is not None and self.servers:
            raise _refused(
                "--home", f"{self.home} with --servers {self.servers}", "one place for the rows"
            )
        if self.home is not None and self.ranks > 1:
            raise _refused(
                "--home",
                f"{self.home} with --ranks {self.ranks}",
                "one process, or --servers, whose rows ranks can share",
            )
        if self.interval < 1:
            raise _refused("--interval", str(self.interval), "1 or more batches")
        if self.steps < 4 * self.interval:
            raise _refused(
                "--steps",
                f"{self.steps} steps with an interval of {self.interval}",
                "at least four intervals: two before the kill and two after it",
            )

    def _require_plain(self) -> None:
        """Refuse what keyed tables do not work with.

        Raises:
            SettingsError: it is asked for.
        """
        conflicts = {
            f"--ranks {self.ranks}": self.ranks > 1,
            "--lookahead": self.lookahead,
            f"--home {self.home}": self.home is not None,
            f"--servers {self.servers}": self.servers > 0,
        }
        for option, is_given in conflicts.items():
            if is_given:
                raise _refused("--keyed", f"--keyed with {option}", "one process, tables in memory")


def _refused(setting: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        setting, found=found, expected=expected, next_step=f"give another {setting}"
    )

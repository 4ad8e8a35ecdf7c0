"""Says which rows share parity, and which server has each row and each parity row.

A *stripe* is `data` consecutive rows of a table and their `parity` parity rows, all on different
servers. Servers get rows and parity in a pattern that repeats after some stripes, the *cycle*. The
pattern deals parity rows out to the servers in turn. Then it gives each row to the server that has
the fewest rows so far, among those on hosts that the stripe does not use yet, if there are any.

A row has a slot on its server, and a parity row has one among the parity rows there. On each
server both kinds of slots ascend with the stripes.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.errors import SettingsError

__all__ = ["MOST_PARITY", "Parity", "Receiver", "Stripes", "TablesStripes", "stripes_of"]

MOST_PARITY: Final = 2
#: A cycle has the stripes of so many rounds over the servers, so that the servers' shares of rows
#: even out also where hosts restrict the choice.
_ROUNDS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Says how many embedding servers may be lost at a time, and how many rows share parity.

        home = recpoint.embeddings.servers(count=5, parity=recpoint.Parity(data=4, parity=1))

    A stripe is `data` rows on as many servers, and `parity` parity rows on other servers. So memory
    for rows grows by parity / data, and each row that is written back is sent `parity` times more,
    from server to server. At least data + parity servers are needed.

    Args:
        data: rows of a stripe, 1 or more.
        parity: servers that may be lost at the same time: 1 or 2.

    Raises:
        SettingsError: a number that cannot work.
    """

    data: int
    parity: int = 1

    def __post_init__(self) -> None:
        for name, most in (("data", 64), ("parity", MOST_PARITY)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise SettingsError(
                    f"Parity({name}=...)",
                    found=f"{value!r:.100}",
                    expected=f"1 to {most}",
                    next_step=f"change {name}",
                )

    def require_servers(self, count: int) -> None:
        """Refuse fewer servers than a stripe needs.

        Args:
            count: number of embedding servers.

        Raises:
            SettingsError: names both numbers.
        """
        if count < self.data + self.parity:
            raise SettingsError(
                f"Parity(data={self.data}, parity={self.parity})",
                found=f"{count} embedding servers",
                expected=f"at least {self.data + self.parity}: each row of a stripe is on a server "
                "of its own",
                next_step="start more servers, or make data smaller",
            )


class Stripes:
    """Where the rows and the parity rows of one table are.

    It has the methods of `Placement` for rows, and more for stripes.

    Args:
        rows: rows of the table, 1 or more.
        parity: the form of a stripe.
        hosts: for each server the name of its host.
        shift: stripes of the pattern to skip, so that small tables begin at different servers.
    """

    def __init__(self, rows: int, parity: Parity, hosts: Sequence[str], shift: int = 0) -> None:
        self.rows = rows
        self.servers = len(hosts)
        self.data = parity.data
        self.parity = parity.parity
        self.count = -(-rows // self.data)
        names = sorted(set(hosts))
        self._cycle = _cycle(parity.data, parity.parity, tuple(names.index(host) for host in hosts))
        self._shift = shift % self._cycle.stripes
        self._data_before = self._cycle.data.before(self._shift)
        self._parity_before = self._cycle.parity.before(self._shift)

    # Rows, as `Placement` has them.

    def slots(self, server: int) -> int:
        """Return how many slots a server needs, 1 or more. Slots begin at 0."""
        return max(1, self._slots_before(server, self.rows))

    def slots_of(self, server: int, rows: range) -> range:
        """Return the slots that rows of a range have on a server; an empty range if none has."""
        before = [self._slots_before(server, row) for row in (rows.start, rows.stop)]
        return range(before[0], max(before))

    def _slots_before(self, server: int, row: int) -> int:
        """Return how many slots of a server come before a row."""
        stripe, position = divmod(row, self.data)
        whole = self._cycle.data.before(stripe + self._shift)[server] - self._data_before[server]
        at = self._cycle.data.servers[(stripe + self._shift) % self._cycle.stripes]
        return int(whole) + int((at[:position] == server).sum())

    def split(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each server which ids are there, and their slots.

        Args:
            ids: int64 [n], ascending, on the CPU.

        Returns:
            For each server positions in `ids`, int64 [m], and slots, int64 [m]. Both ascend.
        """
        stripes = torch.div(ids, self.data, rounding_mode="floor")
        server, slots = self.slots_in(stripes, ids - stripes * self.data)
        found = []
        for number in range(self.servers):
            positions = torch.nonzero(server == number).view(-1)
            found.append((positions, slots[positions]))
        return found

    def slots_by_server(self, ids: Tensor | range) -> list[Tensor | range]:
        """Return for each server the slots of rows, as `Placement.slots_by_server` does."""
        if isinstance(ids, range):
            return [self.slots_of(server, ids) for server in range(self.servers)]
        return [slots for _, slots in self.split(ids)]

    def ids(self, server: int, slots: Tensor) -> Tensor:
        """Return the rows of slots that `split` returned for a server: int64 [m]."""
        stripes, positions = self.members_at(server, slots)
        return stripes * self.data + positions

    # Stripes.

    def slots_in(self, stripes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return where rows of stripes are.

        Args:
            stripes: int64 [n].
            positions: int64 [n], 0 … data - 1: place of each row in its stripe.

        Returns:
            servers and slots, int64 [n]. A position of the last stripe may have no row.
        """
        servers, slots = self._cycle.data.at(stripes + self._shift, positions)
        return servers, slots - self._data_before[servers]

    def members_at(self, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's slots and their positions there: int64 [n] each."""
        stripes, positions = self._cycle.data.of(server, slots + self._data_before[server])
        return stripes - self._shift, positions

    def parity_slots(self, server: int) -> int:
        """Return how many parity rows are on a server; they begin at 0."""
        after = self._cycle.parity.before(self.count + self._shift)[server]
        return int(after - self._parity_before[server])

    def parity_in(self, stripes: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return where a parity row of stripes is: servers and parity slots, int64 [n] each.

        Args:
            stripes: int64 [n].
            number: 0 … parity - 1, which parity row.
        """
        numbers = torch.full_like(stripes, number)
        servers, slots = self._cycle.parity.at(stripes + self._shift, numbers)
        return servers, slots - self._parity_before[servers]

    def members_of(self, stripe: int) -> list[int]:
        """Return the servers of a stripe's rows, in their order, then those of its parity rows."""
        at = (stripe + self._shift) % self._cycle.stripes
        of_all = torch.cat([self._cycle.data.servers[at], self._cycle.parity.servers[at]])
        return [int(server) for server in of_all]


class TablesStripes:
    """Where the rows and parity rows of several tables are, whose stripes have the same form.

    A row is named by the place of its table, `of`, and its slot. All tensors are int64 [n], or
    shapes that expand to each other.

    Args:
        tables: one or more, on the same hosts.
    """

    def __init__(self, tables: Sequence[Stripes]) -> None:
        first = tables[0]
        self.data, self.parity, self.servers = first.data, first.parity, first.servers
        self._cycle = first._cycle
        self._count = len(tables)
        self._rows, self._shift = (
            torch.tensor(listed, dtype=torch.int64, device="cpu")
            for listed in ([one.rows for one in tables], [one._shift for one in tables])
        )
        self._data_before = torch.stack([one._data_before for one in tables])
        self._parity_before = torch.stack([one._parity_before for one in tables])

    def slots_in(self, of: Tensor, stripes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return servers and slots of rows of stripes; see `Stripes.slots_in`."""
        servers, slots = self._cycle.data.at(stripes + self._shift[of], positions)
        return servers, slots - self._data_before[of, servers]

    def members_at(self, of: Tensor, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's slots, and their positions there."""
        stripes, positions = self._cycle.data.of(server, slots + self._data_before[of, server])
        return stripes - self._shift[of], positions.contiguous()

    def has_row(self, of: Tensor, stripes: Tensor, positions: Tensor) -> Tensor:
        """Return whether a row is there: the last stripe may have fewer rows."""
        return stripes * self.data + positions < self._rows[of]

    def parity_in(self, of: Tensor, stripes: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return servers and parity slots of a parity row of each stripe."""
        numbers = torch.full_like(stripes, number)
        servers, slots = self._cycle.parity.at(stripes + self._shift[of], numbers)
        return servers, slots - self._parity_before[of, servers]

    def parity_at(self, of: Tensor, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's parity slots, and which parity rows these are."""
        stripes, numbers = self._cycle.parity.of(server, slots + self._parity_before[of, server])
        return stripes - self._shift[of], numbers

    def receivers(self, of: Tensor, stripes: Tensor) -> list[Receiver]:
        """Return the servers that have parity rows of stripes.

        Args:
            of: ascending.
            stripes: those of a table ascend.
        """
        found = [self.parity_in(of, stripes, number) for number in range(self.parity)]
        servers, places = (torch.cat(of_all) for of_all in zip(*found, strict=True))
        group = servers * self._count + of.repeat(self.parity)
        # By server and table, then by slot.
        order = places.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        counts = torch.bincount(group, minlength=self.servers * self._count).view(-1, self._count)
        return [
            Receiver(number, of_tables, places[chosen], chosen)
            for number, (of_tables, chosen) in enumerate(
                zip(counts.tolist(), order.split(counts.sum(1).tolist()), strict=True)
            )
            if len(chosen)
        ]


class Receiver(NamedTuple):
    """A server that has parity rows of some rows.

    Attributes:
        server: its number.
        counts: how many parity rows it has of each table.
        slots: int64 [m], parity slots, those of the first table first; those of a table ascend.
        rows: int64 [m], to which row each belongs: i is row i's first parity row, and n + i its
            second one, of n rows.
    """

    server: int
    counts: Sequence[int]
    slots: Tensor
    rows: Tensor


def stripes_of(table: str, *, rows: int, parity: Parity, hosts: Sequence[str]) -> Stripes:
    """Return the stripes of a table. They are the same in each process and each release."""
    return Stripes(rows, parity, hosts, shift=zlib.crc32(table.encode()))


class _Deal(NamedTuple):
    """How members of one kind are dealt out in a cycle.

    Attributes:
        servers: int64 [stripes, members], the server of each member.
        places: int64 [stripes, members], its place among the members of its server in the cycle.
        counts: int64 [servers], members of each server in the cycle.
        back: int64 [servers, most, 2], stripe and member of each place.
        running: int64 [stripes + 1, servers], members of each server before each stripe.
    """

    servers: Tensor
    places: Tensor
    counts: Tensor
    back: Tensor
    running: Tensor

    def before(self, stripe: int) -> Tensor:
        """Return how many members each server has before a stripe, int64 [servers]."""
        cycles, stripe = divmod(stripe, len(self.servers))
        return cycles * self.counts + self.running[stripe]

    def at(self, stripes: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        cycles = torch.div(stripes, len(self.servers), rounding_mode="floor")
        within = stripes - cycles * len(self.servers)
        servers = self.servers[within, members]
        return servers, cycles * self.counts[servers] + self.places[within, members]

    def of(self, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        count = int(self.counts[server])
        cycles = torch.div(slots, count, rounding_mode="floor")
        back = self.back[server, slots - cycles * count]
        return cycles * len(self.servers) + back[:, 0], back[:, 1]


class _Cycle(NamedTuple):
    data: _Deal
    parity: _Deal

    @property
    def stripes(self) -> int:
        return len(self.data.servers)


@functools.lru_cache(maxsize=64)
def _cycle(data: int, parity: int, hosts: tuple[int, ...]) -> _Cycle:
    """Deal the members of one cycle out to servers; `hosts` has a number for each server."""
    servers = len(hosts)
    # Neighbours in this order are on different hosts, as far as hosts allow.
    turns = [hosts[:one].count(hosts[one]) for one in range(servers)]
    order = sorted(range(servers), key=lambda one: (turns[one], hosts[one]))
    rows_of = [0] * servers
    all_rows: list[list[int]] = []
    all_parity: list[list[int]] = []
    for stripe in range(servers * _ROUNDS):
        # In turn, so that in any part of the table servers differ by at most one parity row.
        used = [order[(stripe * parity + number) % servers] for number in range(parity)]
        all_parity.append(list(used))
        for _ in range(data):
            hosts_used = {hosts[one] for one in used}
            best = min(
                (one for one in range(servers) if one not in used),
                key=lambda one: (hosts[one] in hosts_used, rows_of[one], (one - stripe) % servers),
            )
            rows_of[best] += 1
            used.append(best)
        all_rows.append(used[parity:])
    return _Cycle(_deal(all_rows, servers), _deal(all_parity, servers))


def _deal(dealt: list[list[int]], servers: int) -> _Deal:
    at = torch.tensor(dealt, dtype=torch.int64, device="cpu")
    is_at = torch.nn.functional.one_hot(at.view(-1), servers)
    places = (is_at.cumsum(0) - 1).gather(1, at.view(-1, 1)).view_as(at)
    counts = is_at.sum(0)
    back = torch.zeros(servers, int(counts.max()), 2, dtype=torch.int64, device="cpu")
    stripe, member = torch.meshgrid(
        *(torch.arange(size, dtype=torch.int64, device="cpu") for size in at.shape), indexing="ij"
    )
    back[at, places] = torch.stack([stripe, member], dim=2)
    running = torch.zeros(len(dealt) + 1, servers, dtype=torch.int64, device="cpu")
    running[1:] = is_at.view(len(dealt), -1, servers).sum(1).cumsum(0)
    return _Deal(at, places, counts, back, running)

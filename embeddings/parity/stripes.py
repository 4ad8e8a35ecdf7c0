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
        cycle = _cycle(parity.data, parity.parity, tuple(names.index(host) for host in hosts))
        self._row_members = _MemberPlaces.begun_at(cycle.data, shift % cycle.stripes)
        self._parity_members = _MemberPlaces.begun_at(cycle.parity, shift % cycle.stripes)

    def slots(self, server: int) -> int:
        """Return how many slots a server needs, 1 or more. Slots begin at 0."""
        return max(1, self._slots_before(server, self.rows))

    def slots_of(self, server: int, rows: range) -> range:
        """Return the slots that rows of a range have on a server; an empty range if none has."""
        slots_before = [self._slots_before(server, row) for row in (rows.start, rows.stop)]
        return range(slots_before[0], max(slots_before))

    def _slots_before(self, server: int, row: int) -> int:
        """Return how many slots of a server come before a row."""
        stripe, position = divmod(row, self.data)
        in_stripe = self._row_members.servers_of(stripe)[:position]
        return self._row_members.slots_before(server, stripe) + int((in_stripe == server).sum())

    def split(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each server which ids are there, and their slots.

        Args:
            ids: int64 [n], ascending, on the CPU.

        Returns:
            For each server positions in `ids`, int64 [m], and slots, int64 [m]. Both ascend.
        """
        stripes = torch.div(ids, self.data, rounding_mode="floor")
        server, slots = self.slots_in(stripes, ids - stripes * self.data)
        by_server = []
        for number in range(self.servers):
            positions = torch.nonzero(server == number).view(-1)
            by_server.append((positions, slots[positions]))
        return by_server

    def slots_by_server(self, ids: Tensor | range) -> list[Tensor | range]:
        """Return for each server the slots of rows, as `Placement.slots_by_server` does."""
        if isinstance(ids, range):
            return [self.slots_of(server, ids) for server in range(self.servers)]
        return [slots for _, slots in self.split(ids)]

    def ids(self, server: int, slots: Tensor) -> Tensor:
        """Return the rows of slots that `split` returned for a server: int64 [m]."""
        stripes, positions = self.members_at(server, slots)
        return stripes * self.data + positions

    def slots_in(self, stripes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return where rows of stripes are.

        Args:
            stripes: int64 [n].
            positions: int64 [n], 0 … data - 1: place of each row in its stripe.

        Returns:
            servers and slots, int64 [n]. A position of the last stripe may have no row.
        """
        return self._row_members.at(stripes, positions)

    def members_at(self, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's slots and their positions there: int64 [n] each."""
        return self._row_members.of(server, slots)

    def parity_slots(self, server: int) -> int:
        """Return how many parity rows are on a server; they begin at 0."""
        return self._parity_members.slots_before(server, self.count)

    def parity_in(self, stripes: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return where a parity row of stripes is: servers and parity slots, int64 [n] each.

        Args:
            stripes: int64 [n].
            number: 0 … parity - 1, which parity row.
        """
        return self._parity_members.at(stripes, torch.full_like(stripes, number))

    def members_of(self, stripe: int) -> list[int]:
        """Return the servers of a stripe's rows, in their order, then those of its parity rows."""
        of_rows = self._row_members.servers_of(stripe)
        of_parity = self._parity_members.servers_of(stripe)
        return [int(server) for server in torch.cat([of_rows, of_parity])]


class TablesStripes:
    """Where the rows and parity rows of several tables are, whose stripes have the same form.

    A row is named by the place of its table and its slot. All tensors are int64 [n], or shapes that
    expand to each other.

    Args:
        tables: one or more, on the same hosts.
    """

    def __init__(self, tables: Sequence[Stripes]) -> None:
        first = tables[0]
        self.data, self.parity, self.servers = first.data, first.parity, first.servers
        self._count = len(tables)
        rows = [table.rows for table in tables]
        self._rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._row_members = _MemberPlaces.of_tables([table._row_members for table in tables])
        self._parity_members = _MemberPlaces.of_tables([table._parity_members for table in tables])

    def slots_in(
        self, table_places: Tensor, stripes: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return servers and slots of rows of stripes; see `Stripes.slots_in`."""
        return self._row_members.at(stripes, positions, table_places)

    def members_at(self, table_places: Tensor, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's slots, and their positions there."""
        stripes, positions = self._row_members.of(server, slots, table_places)
        return stripes, positions.contiguous()

    def has_row(self, table_places: Tensor, stripes: Tensor, positions: Tensor) -> Tensor:
        """Return whether a row is there: the last stripe may have fewer rows."""
        return stripes * self.data + positions < self._rows[table_places]

    def parity_in(
        self, table_places: Tensor, stripes: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Return servers and parity slots of a parity row of each stripe."""
        return self._parity_members.at(stripes, torch.full_like(stripes, number), table_places)

    def parity_at(self, table_places: Tensor, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's parity slots, and which parity rows these are."""
        return self._parity_members.of(server, slots, table_places)

    def receivers(self, table_places: Tensor, stripes: Tensor) -> list[Receiver]:
        """Return the servers that have parity rows of stripes.

        Args:
            table_places: ascending.
            stripes: those of a table ascend.
        """
        by_number = [self.parity_in(table_places, stripes, number) for number in range(self.parity)]
        servers, slots = (torch.cat(columns) for columns in zip(*by_number, strict=True))
        group = servers * self._count + table_places.repeat(self.parity)
        # By server and table, then by slot.
        order = slots.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        counts = torch.bincount(group, minlength=self.servers * self._count).view(-1, self._count)
        return [
            Receiver(number, of_tables, slots[chosen], chosen)
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
        members_at: int64 [servers, most, 2], stripe and member of each place.
        running: int64 [stripes + 1, servers], members of each server before each stripe.
    """

    servers: Tensor
    places: Tensor
    counts: Tensor
    members_at: Tensor
    running: Tensor

    def before(self, stripe: int) -> Tensor:
        """Return how many members each server has before a stripe, int64 [servers]."""
        cycles, stripe = divmod(stripe, len(self.servers))
        return cycles * self.counts + self.running[stripe]

    def at(self, stripes: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        cycles = torch.div(stripes, len(self.servers), rounding_mode="floor")
        in_cycle = stripes - cycles * len(self.servers)
        servers = self.servers[in_cycle, members]
        return servers, cycles * self.counts[servers] + self.places[in_cycle, members]

    def of(self, server: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        count = int(self.counts[server])
        cycles = torch.div(slots, count, rounding_mode="floor")
        members_at = self.members_at[server, slots - cycles * count]
        return cycles * len(self.servers) + members_at[:, 0], members_at[:, 1]


class _MemberPlaces(NamedTuple):
    """Where members of one kind are, in a table that begins in the middle of a cycle.

    It also stands for several tables. Then the last argument of `at` and `of` says which table a
    member is of, int64 [n].

    Attributes:
        deal: how the cycle deals them out.
        shift: int64 [] or [tables], stripes of the cycle that come before the table.
        skipped: int64 [servers] or [tables, servers], members of each server in these stripes.
    """

    deal: _Deal
    shift: Tensor
    skipped: Tensor

    @staticmethod
    def begun_at(deal: _Deal, shift: int) -> _MemberPlaces:
        """Return the members of a table."""
        return _MemberPlaces(deal, torch.tensor(shift, device="cpu"), deal.before(shift))

    @staticmethod
    def of_tables(tables: Sequence[_MemberPlaces]) -> _MemberPlaces:
        """Return the members of several tables with the same cycle."""
        shifts = torch.stack([table.shift for table in tables])
        return _MemberPlaces(
            tables[0].deal, shifts, torch.stack([table.skipped for table in tables])
        )

    def at(self, stripes: Tensor, members: Tensor, *table_places: Tensor) -> tuple[Tensor, Tensor]:
        """Return servers and slots of members of stripes."""
        servers, slots = self.deal.at(stripes + self.shift[table_places], members)
        return servers, slots - self.skipped[(*table_places, servers)]

    def of(self, server: int, slots: Tensor, *table_places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stripes of a server's slots, and which members of them these are."""
        stripes, members = self.deal.of(server, slots + self.skipped[..., server][table_places])
        return stripes - self.shift[table_places], members

    def slots_before(self, server: int, stripe: int) -> int:
        """Return how many members of one table are on a server before a stripe."""
        return int(self.deal.before(stripe + int(self.shift))[server] - self.skipped[server])

    def servers_of(self, stripe: int) -> Tensor:
        """Return the server of each member of one table's stripe."""
        return self.deal.servers[(stripe + int(self.shift)) % len(self.deal.servers)]


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
    turns = [hosts[:server].count(hosts[server]) for server in range(servers)]
    order = sorted(range(servers), key=lambda server: (turns[server], hosts[server]))
    rows_of = [0] * servers
    all_rows: list[list[int]] = []
    all_parity: list[list[int]] = []
    for stripe in range(servers * _ROUNDS):
        # In turn, so that in any part of the table servers differ by at most one parity row.
        used = [order[(stripe * parity + number) % servers] for number in range(parity)]
        all_parity.append(list(used))
        for _ in range(data):
            hosts_used = {hosts[server] for server in used}
            best = min(
                (server for server in range(servers) if server not in used),
                key=lambda server: (
                    hosts[server] in hosts_used,
                    rows_of[server],
                    (server - stripe) % servers,
                ),
            )
            rows_of[best] += 1
            used.append(best)
        all_rows.append(used[parity:])
    return _Cycle(_deal(all_rows, servers), _deal(all_parity, servers))


def _deal(dealt: list[list[int]], servers: int) -> _Deal:
    server_of = torch.tensor(dealt, dtype=torch.int64, device="cpu")
    is_on = torch.nn.functional.one_hot(server_of.view(-1), servers)
    places = (is_on.cumsum(0) - 1).gather(1, server_of.view(-1, 1)).view_as(server_of)
    counts = is_on.sum(0)
    members_at = torch.zeros(servers, int(counts.max()), 2, dtype=torch.int64, device="cpu")
    stripe, member = torch.meshgrid(
        *(torch.arange(size, dtype=torch.int64, device="cpu") for size in server_of.shape),
        indexing="ij",
    )
    members_at[server_of, places] = torch.stack([stripe, member], dim=2)
    running = torch.zeros(len(dealt) + 1, servers, dtype=torch.int64, device="cpu")
    running[1:] = is_on.view(len(dealt), -1, servers).sum(1).cumsum(0)
    return _Deal(server_of, places, counts, members_at, running)

"""Collects the members of stripes from the servers, and computes members of them.

A lost row is the sum of the other rows of its stripe and the first parity row. Usually all of them
are known: then the servers' answers are added up as they are. Otherwise the members are put in
their places, and `kernels.erasure` finds the lost one from those that are left. A lost parity row
is a sum of all rows, in a second one each times its coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from recpoint.embeddings.parity.own_tables import Batch, OwnTable
from recpoint.embeddings.parity.peers import HasMembers, Members, Moment, OutOfStep
from recpoint.embeddings.parity.stripe_check import CONDENSED_BYTES
from recpoint.errors import ServerLost
from recpoint.kernels import erasure, row_gather

__all__ = ["Gathering", "Together", "chosen_rows"]

T = TypeVar("T")


class Together(Protocol):
    """Makes calls, at the same time if it can."""

    def __call__(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the calls' results once all have ended. Raises what the first raises."""


class _MemberAnswer(NamedTuple):
    """What one server has sent.

    Attributes:
        stripes: int64 [m], ascending, the place of each row's stripe.
        positions: int64 [m], the member that each row is.
        members: the rows.
    """

    stripes: Tensor
    positions: Tensor
    members: Members


class Gathering:
    """Members of stripes, as the servers have them.

    Args:
        batch: rows or parity rows of the stripes, one of each.
        stripes: int64 [n], the stripe of each.
        sources: the servers that are asked: incarnation and rows, by number.
        together: makes calls to several servers.
        recover: as for `Peer.rows`.
        is_condensed: as for `Peer.rows`.

    Raises:
        ServerLost, OutOfStep: a server does not answer.
    """

    def __init__(
        self,
        batch: Batch,
        stripes: Tensor,
        sources: Mapping[int, tuple[int, HasMembers]],
        together: Together,
        *,
        recover: bool,
        is_condensed: bool = False,
    ) -> None:
        self._batch = batch
        self._stripes = stripes
        self._sources = sources
        self._together = together
        self._is_condensed = is_condensed
        self._row_bytes = CONDENSED_BYTES if is_condensed else batch.tables[0].coded_bytes
        self._moments: dict[int, Moment] = {}
        self._generations: list[set[int]] = [set() for _ in batch.tables]
        self._answers: list[_MemberAnswer] = []
        self._parity: dict[int, list[_MemberAnswer]] = {}  # by number of the parity row
        self._ask_for_rows(recover)

    def _ask_for_rows(self, recover: bool) -> None:
        form, table_places = self._batch.stripes, self._batch.table_places.view(-1, 1)
        positions = torch.arange(form.data, dtype=torch.int64, device="cpu")
        servers, slots = form.slots_in(table_places, self._stripes.view(-1, 1), positions)
        self._has_row = form.has_row(table_places, self._stripes.view(-1, 1), positions)
        servers = torch.where(self._has_row, servers, -1).view(-1)
        slots = slots.view(-1)
        questions, calls = [], []
        for number, (_, peer) in self._sources.items():
            # A server has at most one row of a stripe, so its slots ascend with the stripes.
            chosen = (servers == number).nonzero().view(-1)
            if len(chosen):
                stripe = torch.div(chosen, form.data, rounding_mode="floor")
                tables, table_slots = self._batch.by_table(
                    self._batch.table_places[stripe], slots[chosen]
                )
                questions.append((number, stripe, chosen - stripe * form.data, tables))
                ask = partial(peer.rows, recover=recover, is_condensed=self._is_condensed)
                calls.append(partial(ask, table_slots))
        answers = self._together(calls)
        for (number, stripe, member, tables), members in zip(questions, answers, strict=True):
            self._moments[number] = members.moment
            self._answers.append(self._heard(tables, _MemberAnswer(stripe, member, members)))

    def ask_for_parity(self, number: int) -> None:
        """Ask for a parity row of each stripe, as of the rows' moments.

        Args:
            number: 0 … parity - 1, which parity row.

        Raises:
            ServerLost, OutOfStep: a server does not answer, or has moved on.
        """
        batch = self._batch
        servers, parity_slots = batch.stripes.parity_in(batch.table_places, self._stripes, number)
        questions, calls = [], []
        for server, (_, peer) in self._sources.items():
            chosen = (servers == server).nonzero().view(-1)
            if len(chosen):
                tables, table_slots = batch.by_table(
                    batch.table_places[chosen], parity_slots[chosen]
                )
                questions.append((chosen, tables))
                ask = partial(peer.parity_rows, is_condensed=self._is_condensed)
                calls.append(partial(ask, table_slots, self.seen_by(server)))
        member = batch.stripes.data + number
        self._parity[number] = [
            self._heard(tables, _MemberAnswer(chosen, torch.full_like(chosen, member), members))
            for (chosen, tables), members in zip(questions, self._together(calls), strict=True)
        ]

    def _heard(self, tables: Sequence[int], answer: _MemberAnswer) -> _MemberAnswer:
        for table, generation in zip(tables, answer.members.generations, strict=True):
            self._generations[table].add(generation)
        return answer

    def require_one_generation(self) -> None:
        """Refuse rows of before and after a table was cleared.

        Raises:
            OutOfStep: names the table.
        """
        for table, generations in zip(self._batch.tables, self._generations, strict=True):
            if len(generations) > 1:
                raise OutOfStep(f"table {table.name!r:.100} is being cleared")

    def seen_by(self, server: int) -> dict[int, tuple[int, int]]:
        """The rows' moments as a server with parity rows counts them; see `Peer.parity_rows`.

        Raises:
            OutOfStep: a source sends to another incarnation of the server, or to none.
        """
        server_incarnation, _ = self._sources[server]
        moments: dict[int, tuple[int, int]] = {}
        for source, (incarnation, last) in self._moments.items():
            if source == server:
                continue  # none of its rows is in a stripe whose parity it has
            receiver_incarnation, number = last.get(server, (0, 0))
            if receiver_incarnation != server_incarnation:
                raise OutOfStep(f"server {source + 1} does not send to server {server + 1}")
            moments[source] = incarnation, number
        return moments

    def lost_rows(self, lost_positions: Tensor, lost: int) -> Tensor:
        """Return the rows at one position of each stripe, which a server has lost.

        Asks for parity rows.

        Args:
            lost_positions: int64 [n], the positions.
            lost: number of the server, which is no source.

        Returns:
            uint8 [n, row_bytes].

        Raises:
            ServerLost: too many members of a stripe are lost, or a server does not answer.
            OutOfStep: servers have moved on.
        """
        form = self._batch.stripes
        self.ask_for_parity(0)
        if _are_known(self._answers) and _are_known(self._parity[0]):
            return self._sum([*self._parity[0], *self._answers])
        rows, is_known = self.members()
        if form.parity > 1 and bool((is_known.sum(0) < form.data).any()):
            self.ask_for_parity(1)
            rows, is_known = self.members()
        out = torch.empty_like(rows[0])
        # Stripes that have lost the same members are decoded together.
        for first, chosen in _groups([lost_positions, *is_known]):
            known_members = [member for member, flags in enumerate(is_known) if flags[first]]
            if len(known_members) < form.data:
                _refuse_too_few(self._batch.tables[int(self._batch.table_places[first])], lost)
            survivors = {member: chosen_rows(rows[member], chosen) for member in known_members}
            position = int(lost_positions[first])
            decoded = erasure.decode(survivors, form.data, [position])[position]
            row_gather.scatter(decoded, chosen, out)
        return out

    def parity_rows(self, numbers: Tensor) -> Tensor:
        """Return a parity row of each stripe, computed from the rows.

        Args:
            numbers: int64 [n], which parity row.

        Returns:
            uint8 [n, row_bytes].

        Raises:
            OutOfStep: not all rows are known.
        """
        answered = sum(len(answer.stripes) for answer in self._answers)
        if not _are_known(self._answers) or answered < int(self._has_row.sum()):
            raise OutOfStep("rows of a server that has not been started again yet")
        if self._batch.stripes.parity == 1:
            return self._sum(self._answers)
        out = self._zeros(len(self._stripes))
        for stripes, positions, members in self._answers:
            is_second = numbers[stripes] == 1
            for flags in (~is_second, is_second):
                chosen = flags.nonzero().view(-1)
                times = positions[chosen] if flags is is_second else None
                erasure.apply(out, stripes[chosen], chosen_rows(members.rows, chosen), times)
        return out

    def _sum(self, answers: Sequence[_MemberAnswer]) -> Tensor:
        out = self._zeros(len(self._stripes))
        for stripes, _, members in answers:
            erasure.apply(out, stripes, members.rows)
        return out

    def members(self) -> tuple[Tensor, Tensor]:
        """Return all members, and whether they are known.

        A place without a row, in the last stripe, counts as known.

        Returns:
            uint8 [members, n, row_bytes], zeros where nothing is known, and bool [members, n].
        """
        form, n = self._batch.stripes, len(self._stripes)
        count = form.data + form.parity
        rows = self._zeros(count * n)
        is_known = torch.zeros(count * n, dtype=torch.bool, device="cpu")
        is_known[: form.data * n] = ~self._has_row.t().reshape(-1)
        for answers in (self._answers, *self._parity.values()):
            for stripes, positions, members in answers:
                places = positions * n + stripes
                row_gather.scatter(members.rows, places, rows)
                is_known[places] = members.is_known
        return rows.view(count, n, self._row_bytes), is_known.view(count, n)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, self._row_bytes, dtype=torch.uint8, device="cpu")


def _are_known(answers: Sequence[_MemberAnswer]) -> bool:
    return all(bool(answer.members.is_known.all()) for answer in answers)


def chosen_rows(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return rows[chosen]; `chosen` has no duplicates, and ascends if it has all rows."""
    if len(chosen) == len(rows):
        return rows
    selected = torch.empty(len(chosen), rows.shape[1], dtype=torch.uint8, device="cpu")
    row_gather.gather(rows, chosen, selected)
    return selected


def _refuse_too_few(table: OwnTable, lost: int) -> None:
    raise ServerLost(
        f"rows of table {table.name!r} on embedding server {lost + 1}",
        found=f"more lost members of a stripe than the {table.stripes.parity} that parity "
        "makes up for",
        expected="that the lost servers are recovered before more are lost",
        next_step="restore the last checkpoint",
    )


def _groups(columns: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return where columns have the same values.

    Args:
        columns: int64 or bool [n] each, 1 or more rows.

    Returns:
        For each different row of values its first place, and all its places, int64 [m], ascending.
    """
    group = torch.zeros(len(columns[0]), dtype=torch.int64, device="cpu")
    for column in columns:
        # Most columns have one value. The others divide the groups so far.
        if bool((column != column[0]).any()):
            values, value_places = torch.unique(column, return_inverse=True)
            group = torch.unique(group * len(values) + value_places, return_inverse=True)[1]
    groups = [(group == number).nonzero().view(-1) for number in range(int(group.max()) + 1)]
    return [(int(chosen[0]), chosen) for chosen in groups]

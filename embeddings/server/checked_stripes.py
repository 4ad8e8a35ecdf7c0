"""Has embedding servers compare rows with their parity, and names rows that do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NoReturn

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import Checked
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.stripe_check import StripeVerdict
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.links import ServerLinks
from recpoint.embeddings.server.messages import CheckStripes
from recpoint.embeddings.server.placed_rows import ServerTable
from recpoint.embeddings.server.transport import SlotRows
from recpoint.errors import HomeError, ServerLost

__all__ = ["checked_stripes"]

_LOG: Final = logging.getLogger("recpoint")


def checked_stripes(
    links: ServerLinks, table: ServerTable, ids: Tensor, *, is_recovering: Callable[[], bool]
) -> Checked:
    """Compare the stripes of rows with their parity, at all servers.

    Args:
        links: to the servers.
        table: placed in stripes.
        ids: int64 [n], ascending.
        is_recovering: whether some server recovers its rows. Stripes that could not be compared are
            then no surprise; else the log says why.

    Raises:
        HomeError: rows do not fit their parity. The error names the first stripe.
    """
    placement = table.placement
    assert isinstance(placement, Stripes)
    stripes = torch.div(ids, placement.data, rounding_mode="floor").unique_consecutive()
    servers, slots = placement.parity_in(stripes, 0)
    verdicts = torch.full_like(stripes, int(StripeVerdict.UNKNOWN), dtype=torch.uint8)
    errors: list[HomeError | OutOfStep] = []

    def check(server: int) -> None:
        chosen = (servers == server).nonzero().view(-1)
        link = links[server]
        if not len(chosen):
            return
        transport = link.transport
        try:
            message = CheckStripes(incarnation=link.incarnation, table=table.form.table)
            (verdicts[chosen],) = transport.call(message, [SlotRows(slots[chosen])]).tensors
        except (HomeError, OutOfStep) as error:
            # Stripes with members on a lost server stay unknown.
            if not isinstance(error, (ServerLost, OutOfStep)) and transport is link.transport:
                raise
            errors.append(error)

    links.at_all(check)
    if errors and not is_recovering():
        _LOG.warning(
            "table %r: stripes could not be compared with their parity: %s",
            table.form.table,
            errors[0],
        )
    misfits = (verdicts >= StripeVerdict.DIFFERS).nonzero().view(-1)
    if len(misfits):
        first = misfits[0]
        _refuse_damaged(table, placement, int(stripes[first]), int(verdicts[first]), len(misfits))
    fits = int((verdicts == StripeVerdict.FITS).sum())
    return Checked(stripes=fits, unknown=len(verdicts) - fits)


def _refuse_damaged(
    table: ServerTable, placement: Stripes, stripe: int, verdict: int, count: int
) -> NoReturn:
    rows = range(stripe * placement.data, min((stripe + 1) * placement.data, placement.rows))
    member_servers = placement.members_of(stripe)
    servers = [*member_servers[: len(rows)], *member_servers[placement.data :]]
    server_names = ", ".join(str(server + 1) for server in servers)
    finding = f"rows {rows.start} to {rows.stop - 1} that do not fit their parity"
    if verdict >= StripeVerdict.DAMAGED:
        member = verdict - StripeVerdict.DAMAGED
        member_name = f"row {rows.start + member}" if member < len(rows) else "a parity row"
        if member < len(rows) or placement.data <= member < len(member_servers):
            server_name = member_servers[member] + 1
            finding = (
                f"{member_name} on embedding server {server_name} that does not fit the others"
            )
    more = f"; {count} such stripes" if count > 1 else ""
    raise HomeError(
        f"stripe {stripe} of table {table.form.table!r}, on embedding servers {server_names}",
        found=f"{finding}{more}",
        expected="parity that was computed of these rows",
        next_step="restore the last checkpoint, and look at the memory of these machines",
    )

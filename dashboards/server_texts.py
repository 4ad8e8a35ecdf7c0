"""Words what a page says about a run's embedding servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from recpoint.catalog.overview.overview import RunOverview
from recpoint.catalog.staging.trainer_note import BEAT_SECONDS
from recpoint.dashboards.texts import NONE, plain
from recpoint.format.servers import AllServers, ServerFacts
from recpoint.units import bytes_text, duration_text, time_text

__all__ = [
    "SERVER_HEADINGS",
    "lost_servers_text",
    "server_row",
    "servers_text",
]


SERVER_HEADINGS = (
    *("Server", "State", "Rows and parity rows", "Takes", "Host", "Address", "Process"),
    "Last loss (UTC)",
)
#: A trainer says how its servers are at least every `BEAT_SECONDS`. After so long, what it said
#: last may not be true any more.
_SILENT_SECONDS = 3 * BEAT_SECONDS


def servers_text(overview: RunOverview) -> str:
    """How embedding servers are: whether all is whole, and since when; empty: there are none."""
    reading = overview.servers
    if reading is None:
        return ""
    if reading.servers is None:
        return f"What the trainer says of its servers cannot be read. {plain(reading.error)}"
    age = duration_text(reading.age_seconds)
    if not reading.trainer_lives:
        return f"The trainer does not run any more. This is what it saw last, {age} ago."
    if reading.age_seconds > _SILENT_SECONDS:
        return f"The trainer has said nothing for {age}. This is what it saw last."
    fallback = "goes back to the newest checkpoint"
    if not overview.checkpoints:
        fallback = "ends this training, which has no checkpoint yet"
    return _redundancy_text(reading.servers, fallback)


def lost_servers_text(overview: RunOverview) -> str:
    """What to know before all else: that a server is not whole; empty: all are, as far as known."""
    reading = overview.servers
    if reading is None or reading.servers is None or not reading.trainer_lives:
        return ""
    return f"Embedding servers: {servers_text(overview)}" if reading.servers.not_whole else ""


def _redundancy_text(servers: AllServers, fallback: str) -> str:
    """Return what losses are made up for; `fallback` says what a loss beyond that does."""
    missing = servers.not_whole
    if not servers.parity:
        if not missing:
            return f"There is no parity: the loss of a server {fallback}."
        answer = "does not answer" if len(missing) == 1 else "do not answer"
        return f"{_numbers_text(missing)} {answer}. There is no parity: that {fallback}."
    if servers.has_given_up:
        names = _numbers_text(missing)
        return f"{names}: more lost at a time than parity makes up for. That {fallback}."
    spare = servers.parity - len(missing)
    if not missing:
        any_of = "Any one server" if spare == 1 else f"Any {spare} servers"
        return f"All is whole, with its parity. {any_of} may be lost.{_last_loss_text(servers)}"
    states = " ".join(_missing_text(server) for server in missing)
    if spare > 0:
        return f"{states} One more server may be lost meanwhile."
    return f"{states} Losing another one now {fallback}."


def _missing_text(server: ServerFacts) -> str:
    if server.state == "lost":
        return f"Server {server.number} is lost, and another process is to take its place."
    return f"Server {server.number} is being rebuilt: {_known_percent(server)} %."


def _last_loss_text(servers: AllServers) -> str:
    losses = [server for server in servers.each if server.whole_ms is not None]
    if not losses:
        return ""
    last = max(losses, key=lambda server: server.whole_ms or 0)
    took = max(0, (last.whole_ms or 0) - (last.lost_ms or 0)) / 1000
    return (
        f" Server {last.number} was lost, and is whole again since {time_text(last.whole_ms or 0)} "
        f"UTC, after {duration_text(took)}."
    )


def _numbers_text(servers: Sequence[ServerFacts]) -> str:
    numbers = ", ".join(str(server.number) for server in servers)
    return f"Server {numbers}" if len(servers) == 1 else f"Servers {numbers}"


def _known_percent(server: ServerFacts) -> int:
    # Rounded down: 100 % is said of a server that is whole.
    return 100 * server.known_rows // server.rows if server.rows else 0


def server_row(server: ServerFacts, parity: int) -> tuple[str, ...]:
    """The texts of a server's row, as `SERVER_HEADINGS`."""
    state, rows = "whole" if parity else "up", f"{server.rows:,}"
    if server.state == "lost":
        state = "lost"
    elif server.state == "recovering":
        state = f"being rebuilt: {_known_percent(server)} %"
        rows = f"{server.known_rows:,} of {server.rows:,}"
    disk = f", {bytes_text(server.disk_bytes)} on disk" if server.disk_bytes else ""
    loss = NONE
    if server.lost_ms is not None:
        recovered = (
            "" if server.whole_ms is None else f", whole again {time_text(server.whole_ms)[11:]}"
        )
        loss = f"{time_text(server.lost_ms)}{recovered}"
    return (
        str(server.number),
        state,
        rows,
        NONE if server.memory_bytes is None else bytes_text(server.memory_bytes) + disk,
        plain(server.host) or NONE,
        plain(server.address) or NONE,
        str(server.pid) if server.pid else NONE,
        loss,
    )

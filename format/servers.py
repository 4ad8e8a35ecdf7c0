"""Defines the record in which a trainer says how its embedding servers are (format §7)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format.records import Generation, Milliseconds, Part, Record

__all__ = ["ServerFacts", "ServerState", "AllServers", "ServersRecord"]

MAX_SERVERS = 4_096

#: up: it has all rows that belong there, as far as the trainer knows. lost: it does not answer, and
#: no process in its place answers trainers yet. recovering: such a process answers, and computes
#: the rows from those of other servers.
ServerState = Literal["up", "lost", "recovering"]

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class ServerFacts(Part):
    """One embedding server, or what is in its place now.

    Attributes:
        number: from 1 on, as logs and errors count.
        host: name of its machine.
        pid: its process there.
        address: `HOST:PORT` where it listens; empty: trainers do not call it over TCP.
        state: see `ServerState`.
        rows: rows and parity rows that belong there; those never written take no memory.
        known_rows: how many of them are there.
        memory_bytes, disk_bytes: what it takes; None: it has not said so yet.
        lost_ms: when the trainer noticed its last loss, since the epoch; None: it was never lost.
        whole_ms: when all its rows were there again after that; None: not yet, or never lost.
    """

    number: Annotated[int, Field(ge=1, le=MAX_SERVERS)]
    host: Annotated[str, Field(max_length=255)]
    pid: Annotated[int, Field(ge=0, lt=2**32)]
    address: Annotated[str, Field(max_length=300)]
    state: ServerState
    rows: _Count
    known_rows: _Count
    memory_bytes: _Count | None
    disk_bytes: _Count | None
    lost_ms: Milliseconds | None
    whole_ms: Milliseconds | None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.known_rows > self.rows:
            raise ValueError(f"{self.known_rows} of {self.rows} rows")
        if self.whole_ms is not None and self.lost_ms is None:
            raise ValueError("whole again without a loss")
        return self


class AllServers(Part):
    """All embedding servers of a training.

    Attributes:
        parity: how many of them may be lost at a time; 0: there is no parity.
        has_given_up: whether more are lost than parity makes up for.
        each: in the order of their numbers.
    """

    parity: Annotated[int, Field(ge=0, le=2)]
    has_given_up: bool
    each: Annotated[
        tuple[ServerFacts, ...],
        Field(min_length=1, max_length=MAX_SERVERS, strict=False),
        FailFast(),
    ]

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        if [server.number for server in self.each] != list(range(1, len(self.each) + 1)):
            raise ValueError("servers that are not numbered from 1 on")
        return self

    @property
    def not_whole(self) -> tuple[ServerFacts, ...]:
        """The servers that have not all their rows."""
        return tuple(server for server in self.each if server.state != "up")


class ServersRecord(Record):
    """`servers.json`: what rank 0 of a training last saw of its embedding servers.

    Attributes:
        run_url: the run that is trained.
        generation: of the training.
        at_ms: when this was seen, since the epoch by the trainer's clock.
        servers: see `AllServers`.
    """

    format: Literal["recpoint/servers"] = "recpoint/servers"
    run_url: Annotated[str, Field(max_length=4_096)]
    generation: Generation
    at_ms: Milliseconds
    servers: AllServers

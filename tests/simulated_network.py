"""Stands between a home and its servers: passes calls on, or loses, repeats and delays them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.server.transport import (
    Message,
    RecordUse,
    Reply,
    RowMessage,
    SlotRows,
    Transport,
)
from recpoint.errors import ServerLost
from recpoint.format.records import Part

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Part)


class PassedOn(Transport):
    """Passes each call on to a server that may be replaced, by way of `deliver`."""

    def __init__(self, server: Transport) -> None:
        self.server = server
        self.names: list[str] = []
        self.most_bytes = 0

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        self.names.append(name)
        return call()

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        size = sum(part.nbytes for row_part in rows for part in row_part if part is not None)
        self.most_bytes = max(self.most_bytes, size)
        late = [
            SlotRows(
                row_part.slots.clone(),
                None if row_part.records is None else row_part.records.clone(),
            )
            for row_part in rows
        ]

        def ask() -> Reply[AnswerT]:
            reply = self.server.call(message, late)
            if isinstance(message, RowMessage) and message.records is RecordUse.FILLED:
                for row_part, copied, has in zip(rows, late, reply.tensors, strict=True):
                    assert row_part.records is not None and copied.records is not None
                    row_part.records[has] = copied.records[has]
            return reply

        return self.deliver(message.kind, ask)

    def close(self) -> None:
        self.names.append("close")
        self.server.close()


class Unreliable(PassedOn):
    """Loses requests and answers, repeats requests, and brings copies of them late, in any order.

    As `TcpTransport`, it repeats a call that has no answer, and gives up after a while.
    """

    def __init__(self, server: Transport, seed: int) -> None:
        super().__init__(server)
        self._random = random.Random(seed)
        self._late: list[Callable[[], object]] = []
        self.trouble = 0

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        for _ in range(2):
            while self._late and self._random.random() < 0.3:
                late = self._late.pop(self._random.randrange(len(self._late)))
                try:
                    late()
                except Exception:  # noqa: BLE001  # nobody reads this answer
                    self.trouble += 1
            fate = self._random.random()
            if fate < 0.5:
                return super().deliver(name, call)
            self.trouble += 1
            if name != "fetch" and self._random.random() < 0.5:  # a late answer has no reader
                self._late.append(call)
            if fate < 0.75:  # the answer is lost
                try:
                    super().deliver(name, call)
                except ServerLost:
                    pass
        raise ServerLost("server", found="no answer", expected="an answer", next_step="try again")


class Repeating(Home):
    """Repeats each call to a home that failed because a server did not answer."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        repeated(lambda: self._home.add_table(table, rows=rows, record_bytes=record_bytes))

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        return repeated(lambda: self._home.fetch(table, ids, out))

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        repeated(lambda: self._home.write_back(table, ids, records, batch=batch))

    def fetch_all(self, wanted: Sequence[TableRows]) -> list[Tensor]:
        return repeated(lambda: self._home.fetch_all(wanted))

    def write_back_all(self, changed: Sequence[TableRows], *, batch: int) -> None:
        repeated(lambda: self._home.write_back_all(changed, batch=batch))

    def freeze(self, table: str, rows: range) -> FrozenRows:
        return _RepeatingFrozen(repeated(lambda: self._home.freeze(table, rows)))

    def clear(self, table: str) -> None:
        repeated(lambda: self._home.clear(table))

    def size_bytes(self) -> dict[str, int]:
        return repeated(self._home.size_bytes)

    def close(self) -> None:
        self._home.close()


class _RepeatingFrozen(FrozenRows):
    def __init__(self, frozen: FrozenRows) -> None:
        self._frozen = frozen

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        return repeated(lambda: self._frozen.fetch(ids, out))

    def release(self) -> None:
        self._frozen.release()


def repeated(call: Callable[[], T]) -> T:
    for _ in range(200):
        try:
            return call()
        except ServerLost as error:
            last = error
    raise last

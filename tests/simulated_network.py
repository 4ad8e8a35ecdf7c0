"""Stands between a home and its servers: passes calls on, or loses, repeats and delays them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.server.transport import Greeting, Transport, Value
from recpoint.errors import ServerLost

T = TypeVar("T")


class PassedOn(Transport):
    """Passes each call on to a server that may be replaced, by way of `deliver`."""

    def __init__(self, server: Transport) -> None:
        self.server = server
        self.names: list[str] = []
        self.most_bytes = 0

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        self.names.append(name)
        return call()

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        return self.deliver("hello", lambda: self.server.hello())

    def command(
        self, name: str, arguments: Mapping[str, Value], *, incarnation: int
    ) -> Mapping[str, Value]:
        return self.deliver(
            name, lambda: self.server.command(name, dict(arguments), incarnation=incarnation)
        )

    def fetch(
        self, wanted: Sequence[TableRows], *, incarnation: int, frozen: int | None = None
    ) -> list[Tensor]:
        late = self._copied(wanted)

        def fetch() -> list[Tensor]:
            is_found = self.server.fetch(late, incarnation=incarnation, frozen=frozen)
            for rows, copied, is_present in zip(wanted, late, is_found, strict=True):
                rows.records[is_present] = copied.records[is_present]
            return is_found

        return self.deliver("fetch", fetch)

    def write_back(
        self, changed: Sequence[TableRows], *, incarnation: int, trainer: int, batch: int
    ) -> None:
        late = self._copied(changed)
        self.deliver(
            "write_back",
            lambda: self.server.write_back(
                late, incarnation=incarnation, trainer=trainer, batch=batch
            ),
        )

    def check(self, table: str, slots: Tensor, *, incarnation: int) -> Tensor:
        late = slots.clone()
        return self.deliver(
            "check", lambda: self.server.check(table, late, incarnation=incarnation)
        )

    def stage(
        self,
        frozen: int,
        slots: Tensor,
        records: Tensor | None = None,
        *,
        incarnation: int,
        first: int = 0,
    ) -> Tensor:
        late = slots.clone(), None if records is None else records.clone()
        return self.deliver(
            "stage",
            lambda: self.server.stage(frozen, *late, incarnation=incarnation, first=first),
        )

    def _copied(self, rows: Sequence[TableRows]) -> list[TableRows]:
        size = sum(table_rows.ids.nbytes + table_rows.records.nbytes for table_rows in rows)
        self.most_bytes = max(self.most_bytes, size)
        return [
            TableRows(table_rows.table, table_rows.ids.clone(), table_rows.records.clone())
            for table_rows in rows
        ]

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

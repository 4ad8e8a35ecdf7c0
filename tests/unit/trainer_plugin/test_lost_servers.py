"""A server that loses its rows: the reader says so, and training goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.messages import WriteBack
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.transport import Message, Reply, SlotRows
from recpoint.errors import ServerLost
from recpoint.format.records import Part
from tests.cached_training import (
    Batches,
    as_bits,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
)
from tests.flat_settings import arguments
from tests.training_builder import Place

AnswerT = TypeVar("AnswerT", bound=Part)

SLOTS = {"users": 40, "items": 40}
BATCHES = 36


class Fragile(EmbeddingServer):
    """Ends when it gets its first rows: in the restore for which it was started."""

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        if isinstance(message, WriteBack):
            self.end()
        return super().call(message, rows, within_seconds=within_seconds)


class Servers:
    """Two servers in this process; one that was lost is started again when rows are restored.

    Attributes:
        fragile: how many of those that are started again are lost in the restore.
    """

    def __init__(self) -> None:
        self.fragile = 0
        self.running = [EmbeddingServer(name=f"server {number}") for number in range(2)]
        self.started = 0

    def home(self) -> ServedHome:
        return ServedHome(self.running, revive=self._start)

    def lose(self) -> None:
        self.running[1].end()

    def _start(self, number: int) -> EmbeddingServer:
        self.started += 1
        kind = Fragile if self.started <= self.fragile else EmbeddingServer
        self.running[number] = kind(name=f"server {number}")
        return self.running[number]


class Trained:
    """A model that is trained through servers, and what it was trained on."""

    def __init__(self, servers: Servers) -> None:
        self.home = servers.home()
        self.model, self.cache = cached_model(SLOTS, self.home)
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1)
        self.reader = Lookahead(Batches(9), self.model, window=6)

    def checkpointer(self, place: Place, **settings: Any) -> Checkpointer:
        given = {
            "run": place.run,
            "directory": place.staging,
            "reader": self.reader,
            "interval_batches": 5,
            "small_table_values": 0,
            "close_seconds": 120.0,
            "drain_seconds": 120.0,
            "handle_sigterm": False,
            "announce": False,
            **settings,
        }
        return Checkpointer(self.model, self.optimizer, **arguments(given))

    def train(self, ckpt: Checkpointer, after: Callable[[int], None]) -> None:
        for batch in ckpt.batches(total=BATCHES):
            train_on(self.model, self.optimizer, batch)
            after(ckpt.batches_done + 1)


def train_on(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for one in servers.running:
        one.end()


def same_as_plain(trained: Trained) -> None:
    model = plain_model()
    optimizer = Adagrad(model.parameters(), lr=0.1)
    reader = Batches(9)
    for _ in range(BATCHES // 9):
        for batch in reader:
            train_on(model, optimizer, batch)
    assert rows_of_plain(model, optimizer).differences(rows_of_cache(trained.cache)) == []
    assert torch.equal(as_bits(model.top.weight), as_bits(trained.model.top.weight))


def test_the_reader_names_the_server_that_is_lost(place: Place, servers: Servers) -> None:
    trained = Trained(servers)
    with place.agent(), trained.checkpointer(place) as ckpt:
        ckpt.restore()
        with pytest.raises(ServerLost, match="server 1"):
            trained.train(ckpt, lambda done: servers.lose() if done == 13 else None)
        assert ckpt.batches_done >= 13
    assert servers.started == 0


@pytest.mark.parametrize("lost_at", [11, 15, 27])
def test_training_goes_back_to_the_newest_checkpoint(
    place: Place, servers: Servers, lost_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(servers)
    at = [lost_at]

    def after(done: int) -> None:
        if at and done == at[0]:
            at.clear()
            servers.lose()

    with place.agent(), trained.checkpointer(place, rewinds=1, when_busy="wait") as ckpt:
        ckpt.restore()
        trained.train(ckpt, after)
        assert (ckpt.batches_done, ckpt.epochs_done) == (BATCHES, 3)
    assert servers.started == 1
    said = [one.getMessage() for one in caplog.records if "goes back" in one.getMessage()]
    assert len(said) == 1 and "server 1" in said[0]
    same_as_plain(trained)


@pytest.mark.parametrize("rewinds", [3, 2])
def test_a_loss_in_the_restore_goes_back_once_more(
    place: Place, servers: Servers, rewinds: int
) -> None:
    """Two successors are lost, one after another, while they get their rows."""
    trained = Trained(servers)
    servers.fragile = 2
    at = [15]

    def after(done: int) -> None:
        if at and done == at[0]:
            at.clear()
            servers.lose()

    with place.agent(), trained.checkpointer(place, rewinds=rewinds, when_busy="wait") as ckpt:
        ckpt.restore()
        if rewinds == 2:
            with pytest.raises(ServerLost, match="server 1"):
                trained.train(ckpt, after)
            assert servers.started == 2
            return
        trained.train(ckpt, after)
        assert (ckpt.batches_done, ckpt.epochs_done) == (BATCHES, 3)
    assert servers.started == 3
    same_as_plain(trained)


def test_it_goes_back_no_more_often_than_it_may(place: Place, servers: Servers) -> None:
    trained = Trained(servers)
    with place.agent(), trained.checkpointer(place, rewinds=2, when_busy="wait") as ckpt:
        ckpt.restore()
        with pytest.raises(ServerLost, match="server 1"):
            trained.train(ckpt, lambda done: servers.lose() if done == 12 else None)
    assert servers.started == 2


def test_without_a_checkpoint_it_does_not_go_back(place: Place, servers: Servers) -> None:
    trained = Trained(servers)
    with place.agent(), trained.checkpointer(place, rewinds=2, interval_batches=500) as ckpt:
        ckpt.restore()
        with pytest.raises(ServerLost, match="server 1"):
            trained.train(ckpt, lambda done: servers.lose() if done == 12 else None)

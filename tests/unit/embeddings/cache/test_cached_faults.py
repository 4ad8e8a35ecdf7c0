"""Faults of a home while its rows are trained: each is an error that names file, table and row."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.homes import FileLimits, local
from recpoint.errors import HomeError, RecpointError
from recpoint.kernels.row_blocks import BlockForm
from tests.cached_training import (
    ITEMS,
    USERS,
    Batches,
    Model,
    Rows,
    as_bits,
    cached_model,
    plain_model,
    rows_of_plain,
    train,
)
from tests.flat_settings import arguments
from tests.polling import until
from tests.training_builder import Place

SMALL = {"users": 10, "items": 26}
#: Each block is written at once, and rows stay in one segment.
LIMITS = FileLimits(buffer_bytes=4_096)
#: Rows of each table at home, that is: values and sums in float32.
BLOCKS = BlockForm.of(2 * 6 * 4)


class Trained:
    """A model in a cache, with its optimizer and reader; its home is in files."""

    def __init__(self, directory: Path, limits: FileLimits = LIMITS) -> None:
        self.home: Home = local(directory, limits=limits)
        self.model, self.cache = cached_model(SMALL, self.home, sparse=True)
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1)
        self.reader = Lookahead(Batches(), self.model, window=3)

    def train(self, batches: int, ckpt: Checkpointer | None = None) -> None:
        train(
            self.model,
            self.optimizer,
            self.reader,
            batches=batches,
            after=lambda _: None if ckpt is None else ckpt.step(),
        )

    def close(self) -> None:
        self.cache.close()
        self.home.close()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    found = Trained(tmp_path / "home")
    yield found
    found.close()


@contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """A limit of the process, which stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for_home_thread(cache: Cache) -> None:
    """Wait for what the home thread has to do."""
    cache.mover.thread.submit(lambda: None).result()


def after_batches(count: int, optimizer: Any = None) -> tuple[Model, Rows]:
    """What a model without a cache has after some batches."""
    plain = plain_model(sparse=True)
    own = Adagrad(plain.parameters(), lr=0.1)
    train(plain, own, Batches(), batches=count)
    return plain, rows_of_plain(plain, own)


def flip_all(path: Path) -> None:
    """Flip a bit in each record of a file."""
    data = bytearray(path.read_bytes())
    for slot in range(len(data) // 4_096 * BLOCKS.slots):
        data[BLOCKS.place(slot) + 20] ^= 4
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = {"a flipped byte": (flip_all, "checksum"), "a short read": (cut_off, "end of the file")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("by", ["reader", "lookup", "read_rows"])
def test_damage_at_home_is_named_where_training_is(
    trained: Trained, tmp_path: Path, damage: str, by: str
) -> None:
    trained.train(30)
    wait_for_home_thread(trained.cache)
    done = trained.cache.stats.batches
    segments = sorted((tmp_path / "home").glob("*.log"))
    assert len(segments) == 2  # one for each table
    act, says = DAMAGES[damage]
    for path in segments:
        act(path)
    files = "|".join(re.escape(str(path)) for path in segments)
    named = rf"({files}), table '(users|items)', row \d+: found .*{says}"
    with pytest.raises(HomeError, match=named):
        match by:
            case "reader":
                trained.train(200)
            case "lookup":
                with torch.no_grad():
                    for row in range(USERS):
                        trained.model.users(torch.tensor([row]))
            case _:
                read_rows(trained.model, "users", trained.optimizer)
    if by == "read_rows":
        return  # it asks for no row that training needs
    # Nothing is trained after it, and each call that needs the home says why.
    trained_before = trained.cache.stats.batches
    with pytest.raises(HomeError, match=named):
        next(iter(trained.reader))
    with pytest.raises(HomeError, match=named):
        trained.model.users(torch.arange(USERS))  # rows without a slot are among them
    assert trained.cache.stats.batches == trained_before >= done


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_wrong_is_trained_until_the_damage_is_met(
    trained: Trained, tmp_path: Path, damage: str
) -> None:
    trained.train(30)
    wait_for_home_thread(trained.cache)
    for path in (tmp_path / "home").glob("*.log"):
        DAMAGES[damage][0](path)
    expected = plain_model(sparse=True)
    own = Adagrad(expected.parameters(), lr=0.1)
    reader = Batches()
    train(expected, own, reader, batches=30)
    batches = iter(reader)
    with pytest.raises(HomeError, match="table '(users|items)', row"):
        for batch in trained.reader:
            # What is handed out has its rows in slots, and these are right.
            other = next(batches)
            for model, optimizer in ((trained.model, trained.optimizer), (expected, own)):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(batch), batch["target"])
                loss.backward()
                optimizer.step()
            assert torch.equal(batch["users"], other["users"])
            assert torch.equal(as_bits(trained.model.top.weight), as_bits(expected.top.weight))


def test_a_full_disk_ends_training_at_the_reader(trained: Trained) -> None:
    trained.train(6)
    wait_for_home_thread(trained.cache)
    with file_limit(2 * 4_096):
        with pytest.raises(HomeError, match=r"table-000\d\.\d+-0000\.log.*File too large.*free"):
            trained.train(200)
    done = trained.cache.stats.batches
    with pytest.raises(HomeError, match="File too large"):  # also with room again
        trained.train(1)
    assert trained.cache.stats.batches == done


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few pages. Needs root."""
    at = tmp_path / "disk"
    at.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(at)], check=False
    )
    if tried.returncode:
        pytest.skip("cannot mount here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    trained = Trained(small_disk / "home")
    with pytest.raises(HomeError, match="table-000.*No space left on device"):
        trained.train(200)
    trained.close()
    assert [path.name for path in (small_disk / "home").iterdir()] == ["home.lock"]


def checkpointer(trained: Trained, place: Place, **settings: Any) -> Checkpointer:
    return Checkpointer(
        trained.model,
        trained.optimizer,
        **arguments(
            {
                "run": place.run,
                "directory": place.staging,
                "reader": trained.reader,
                "interval_batches": 30,
                "small_table_values": 0,
                "close_seconds": 60.0,
                "drain_seconds": 60.0,
                "handle_sigterm": False,
                "announce": False,
                **settings,
            }
        ),
    )


@pytest.mark.parametrize("fault", [*DAMAGES, "a full disk"])
def test_a_fault_fails_the_checkpoint_and_earlier_ones_restore(
    trained: Trained, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    limit = file_limit(2 * 4_096) if fault == "a full disk" else None
    with place.agent():
        ckpt = checkpointer(trained, place)
        ckpt.restore()
        trained.train(30, ckpt)
        until(lambda: ckpt.stats.committed == 1)
        ckpt.mark_all("users")  # so that the next one has to read rows at home
        ckpt.mark_all("items")
        if limit is None:
            trained.train(9, ckpt)
            wait_for_home_thread(trained.cache)
            for path in (tmp_path / "home").glob("*.log"):
                DAMAGES[fault][0](path)
        with pytest.raises(RecpointError) as caught:
            if limit is None:
                trained.train(200, ckpt)
            else:
                # The run is not in files as large as that: no checkpoint is due meanwhile.
                with limit:
                    trained.train(200)
        assert isinstance(caught.value, HomeError), caught.value
        ckpt.close(final=False)
        committed = ckpt.stats.committed
    assert committed == 1
    again = plain_model(sparse=True)
    own = Adagrad(again.parameters(), lr=0.1)
    with place.agent():
        second = Checkpointer(
            again,
            own,
            **arguments(
                {
                    "run": place.run,
                    "directory": place.staging,
                    "reader": Batches(),
                    "interval_batches": 30,
                    "small_table_values": 0,
                    "handle_sigterm": False,
                    "announce": False,
                }
            ),
        )
        assert second.restore() is not None
        assert second.batches_done == 30
        second.close(final=False)
    plain, rows = after_batches(30)
    assert rows_of_plain(again, own).differences(rows) == []
    assert torch.equal(as_bits(again.top.weight), as_bits(plain.top.weight))


def test_a_restore_heals_a_cache_whose_home_was_damaged(trained: Trained, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    with place.agent():
        ckpt = checkpointer(trained, place)
        ckpt.restore()
        trained.train(30, ckpt)
        until(lambda: ckpt.stats.committed == 1)
        ckpt.close(final=False)
    wait_for_home_thread(trained.cache)
    for path in (tmp_path / "home").glob("*.log"):
        flip_all(path)
    with pytest.raises(HomeError):
        trained.train(200)
    with place.agent():
        ckpt = checkpointer(trained, place)
        assert ckpt.restore() is not None
        trained.train(7, ckpt)
        ckpt.close()
    _, rows = after_batches(37)
    ids = {"users": torch.arange(USERS), "items": torch.arange(ITEMS)}
    found = {name: trained.cache.rows_of(name, one) for name, one in ids.items()}
    assert rows.differences(Rows(found)) == []

"""The page of a run shows its embedding servers, while one is killed and rebuilt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.servers import read_servers
from tests.browser.conftest import PATIENCE_SECONDS, dashboard
from tests.browser.test_page import CLIPPED, LOW_CONTRAST, NOT_RIGHT
from tests.polling import until as poll

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("nicegui", reason="nicegui is not installed")
T = TypeVar("T")

pytestmark = [pytest.mark.nightly("browser"), pytest.mark.xdist_group("browser")]

#: So many that a server is rebuilt for more than a second, in which the trainer says so.
ROWS = 2_400_000

TRAINER = f"""
import sys, time
import torch
from torch import nn
import recpoint

class Reader:
    done = 0
    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.done)
            self.done += 1
            yield {{"users": torch.randint({ROWS}, (64,), generator=generator)}}
    def state_dict(self):
        return {{"done": self.done}}
    def load_state_dict(self, state):
        self.done = state["done"]

model = nn.ModuleDict({{"users": nn.Embedding({ROWS}, 16, sparse=True)}})
home = recpoint.embeddings.servers(count=3, parity=recpoint.Parity(data=2, parity=1))
recpoint.embeddings.cached(model, home, capacity_rows=2_000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reader = recpoint.Lookahead(Reader(), model, window=5)
with recpoint.Checkpointer(
    model, optimizer, run=sys.argv[1], staging=sys.argv[2], reader=reader,
    interval_batches=1_000_000_000,
) as checkpoints:
    checkpoints.restore()
    for batch in checkpoints.batches(epochs=1):
        optimizer.zero_grad()
        model["users"](batch["users"]).sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""

SERVERS = "[aria-label^='As the trainer of rank 0'] tbody tr:visible"


@contextmanager
def training(run: Path, staging: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(run), str(staging)], stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(look: Callable[[], T | None]) -> T:
    return poll(look, seconds=PATIENCE_SECONDS)


def rows(page: Page) -> list[list[str]]:
    """The texts of the table of servers."""
    lines = page.locator(SERVERS).all()
    return [line.locator("th, td").all_inner_texts() for line in lines]


def says(page: Page, words: str) -> None:
    """Wait until the section of the servers says this."""
    page.locator("section", has_text="Embedding servers").get_by_text(re.compile(words)).wait_for()


def recovering(staging: Path) -> int | None:
    """The process that is rebuilt, as the trainer has told it."""
    (run_dir,) = staging.glob("run-*")
    told = read_servers(StagedRun(run_dir))
    assert told is not None
    return next((one.pid for one in told.servers.each if one.state == "recovering"), None)


def test_a_server_is_killed_and_rebuilt(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, staging = tmp_path / "run", tmp_path / "staging"
    monkeypatch.setenv("RECPOINT_STAGING", str(staging))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = tmp_path / "trainer.log"
    with training(run, staging, log) as trainer, dashboard(tmp_path / "log", str(run)) as address:
        page.goto(address + "run/0")
        says(page, r"^All is whole, with its parity\. Any one server may be lost\.$")
        until(lambda: "–" not in [row[3] for row in rows(page)])
        before = rows(page)
        assert [row[:2] for row in before] == [["1", "whole"], ["2", "whole"], ["3", "whole"]]
        # Each stripe has two rows and their parity row.
        assert sum(int(row[2].replace(",", "")) for row in before) == ROWS * 3 // 2

        os.kill(int(before[1][6]), signal.SIGKILL)
        successor = until(lambda: recovering(staging))
        os.kill(successor, signal.SIGSTOP)  # so that a fast machine shows it, too
        says(page, r"^Server 2 is being rebuilt: \d+ %\. Losing another one now ends this training")
        rebuilt = rows(page)[1]
        assert re.fullmatch(r"being rebuilt: \d+ %", rebuilt[1]), rebuilt
        assert re.fullmatch(r"[\d,]+ of 1,200,000", rebuilt[2]), rebuilt
        assert_readable(page)
        os.kill(successor, signal.SIGCONT)
        says(page, r"Server 2 was lost, and is whole again since [\d: -]+ UTC, after \d")
        assert [row[1] for row in rows(page)] == ["whole"] * 3
        assert rows(page)[1][6] == str(successor)

        trainer.kill()
        says(page, r"^The trainer does not run any more\. This is what it saw last, .* ago\.$")


def assert_readable(page: Page) -> None:
    for width in (420, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate(NOT_RIGHT) == []

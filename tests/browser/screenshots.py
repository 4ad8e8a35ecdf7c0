"""Takes the README's pictures of the live page: python -m tests.browser.screenshots docs/images

Everything in them is real: three trainers of the example on the bundled purchases, their agents, an
S3 server, the page. One training has finished, one goes on, of one the agent has been killed.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.testing.seaweed import SeaweedServer
from tests.agent_process import AgentProcess
from tests.browser.conftest import CHROMIUM_ARGUMENTS, dashboard
from tests.polling import until

__all__ = ["take"]

_BUCKET = "training"
_SECONDS = 400.0
_EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dlrm.py"


def take(images: Path) -> None:
    """Write `dashboard-runs.png` and `dashboard-run.png` into the directory."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(SeaweedServer(work / "s3", bucket=_BUCKET))
        os.environ.update(server.environment())
        urls = {name: f"s3://{_BUCKET}/{name}" for name in ("ranking", "retrieval", "feed")}
        areas = {name: work / name for name in urls}
        agents = {
            name: stack.enter_context(AgentProcess(area, work / f"{name}-agent.log"))
            for name, area in areas.items()
        }
        with _trainer(urls["ranking"], areas["ranking"], work, steps=1200) as finished:
            finished.wait(_SECONDS)
        for name, interval in (("retrieval", 480), ("feed", 320)):
            trained = _trainer(urls[name], areas[name], work, interval=interval, bits="8")
            stack.enter_context(trained)
        until(lambda: _checkpoints(urls["feed"]) >= 4, seconds=_SECONDS)
        agents["feed"].process.kill()
        until(lambda: _checkpoints(urls["retrieval"]) >= 9, seconds=_SECONDS)
        subprocess.run(
            [sys.executable, "-m", "recpoint", "validate", urls["retrieval"], "--level", "full"],
            check=True,
        )
        address = stack.enter_context(dashboard(work / "page.log", *urls.values(), interval=1.0))
        playwright = stack.enter_context(sync_playwright())
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(CHROMIUM_ARGUMENTS)
        )
        stack.callback(chromium.close)
        page = chromium.new_page(viewport={"width": 1280, "height": 400})
        page.goto(address)
        for state in ("ended", "fine", "ALARM"):
            page.get_by_text(state, exact=True).wait_for(timeout=1000 * _SECONDS)
        _save(page, images / "dashboard-runs.png")
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.goto(f"{address}run/1")
        _settled(page)
        _save(page, images / "dashboard-run.png")


def _save(page: Page, path: Path) -> None:
    """A picture of text needs few colours: a third of the bytes."""
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.convert("RGB").quantize(64, method=Image.Quantize.MAXCOVERAGE).save(
            path, optimize=True
        )


def _settled(page: Page) -> None:
    page.get_by_text("validated", exact=True).first.wait_for(timeout=1000 * _SECONDS)
    until(lambda: page.locator(".chart svg").count() == 3)
    page.wait_for_load_state("networkidle")


def _checkpoints(url: str) -> int:
    return len(Run.open(open_store(url)).live_line()) if _started(url) else 0


def _started(url: str) -> bool:
    return any(open_store(url).list("run.json"))


@contextmanager
def _trainer(
    url: str, area: Path, work: Path, *, interval: int = 400, bits: str = "8", steps: int = 10**6
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(_EXAMPLE), "--run", url, "--staging", str(area)]
    command += ["--interval", str(interval), "--bits", bits, "--steps", str(steps)]
    command += ["--batch", "32"]  # the log lasts until the pictures are taken
    with (work / "trainer.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    take(Path(sys.argv[1]))

"""A real page in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.polling import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

#: Page, browser, trainer and agent start on a machine that runs other tests as well.
PATIENCE_SECONDS = 200.0

CHROMIUM_ARGUMENTS = (
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A chromium without a window.

    Not of the whole session: while Playwright is there, an event loop runs in this thread, and
    tests of flows begin one of their own.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable, args=list(CHROMIUM_ARGUMENTS)
        )
        yield chromium
        chromium.close()


@contextmanager
def opened_page(browser: Browser, *, width: int = 1280) -> Iterator[Page]:
    """A page that may load nothing from outside, and on which no script may fail."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    opened = context.new_page()
    outside: list[str] = []
    failed: list[str] = []

    def look(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            outside.append(request.url)

    opened.on("request", look)
    opened.on("pageerror", lambda error: failed.append(str(error)))
    yield opened
    context.close()
    assert not outside, outside
    assert not failed, failed


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page as `opened_page` says."""
    with opened_page(browser) as opened:
        yield opened


@contextmanager
def dashboard(log: Path, *urls: str, interval: float = 0.3) -> Iterator[str]:
    """`recpoint dashboard` in a process of its own; its address."""
    command = [sys.executable, "-m", "recpoint", "dashboard", *urls, "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--interval", str(interval)], stdout=file, stderr=file
        )
    try:
        yield until(lambda: _address(process, log), seconds=PATIENCE_SECONDS)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str | None:
    written = log.read_text(errors="replace")
    assert process.poll() is None, written
    found = re.search(r"the page is at (\S+)", written)
    return found[1] if found else None

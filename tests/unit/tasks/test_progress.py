"""A progress bar never holds up the work that it shows."""

from __future__ import annotations

import socket
import time

import pytest
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from recpoint.tasks import reports
from recpoint.tasks.reports import ProgressBar
from tests.no_threads import no_threads
from tests.polling import until


def test_a_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    patience = {PREFECT_API_REQUEST_TIMEOUT: 3.0, PREFECT_CLIENT_MAX_RETRIES: 0}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings(patience | {PREFECT_API_URL: url}):
            bar = ProgressBar("recpoint-slow", "slow")
            started = time.monotonic()
            for done in range(1, 4):
                bar.show_meanwhile(done, 3)
            took = time.monotonic() - started
            connection, _ = silent.accept()  # it was asked
            until(lambda: bar._ended)  # and is not asked again
            connection.close()
            bar.show_meanwhile(1, 3)
    assert took < 2.5  # less than a single time-out of a request


def test_a_host_that_starts_no_thread_for_a_bar_shows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    bar = ProgressBar("recpoint-slow", "slow")
    with no_threads():
        bar.show_meanwhile(1, 3)
    bar.show_meanwhile(2, 3)  # nor later: no server is asked
    bar.show_meanwhile(3, 3)
    assert bar._ended and bar._teller is None

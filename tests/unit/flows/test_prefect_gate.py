"""Whatever Prefect does, and for however long: the gate closes, and nothing else comes of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from recpoint.flows import prefect_server
from recpoint.flows.agent import gate as prefect_gate
from recpoint.flows.agent.gate import PrefectGate
from tests.polling import until


def test_however_often_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    gate = PrefectGate(enabled=True)
    with caplog.at_level(logging.CRITICAL):
        for _ in range(1100):
            gate.failed("a key that was revoked")
    gate.failed("once more")
    assert "without Prefect for 120 s or more: once more" in caplog.text
    assert gate.persist_flow() is None


@contextmanager
def answering(words: bytes) -> Iterator[str]:
    """The URL of something that says these words to whoever calls, whatever they ask."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(1 << 16)
                    caller.sendall(words)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/api"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_key_in_its_url_is_not_taken_for_a_port() -> None:
    """Prefect's client sends it; here it only matters that something answers."""
    for words, healthy in ((b"200 OK", True), (b"401 No", True), (b"503 Busy", False)):
        with answering(b"HTTP/1.1 " + words + b"\r\nContent-Length: 0\r\n\r\n") as url:
            with_key = url.replace("://", "://me:S3cret-word@")
            assert prefect_server.is_healthy(with_key) is healthy is prefect_server.is_healthy(url)


def test_an_api_that_is_configured_and_away_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefect_gate, "_LOOK_SECONDS", 0.05)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:S3cret-word@127.0.0.1:9/api")
    asked = []
    gate = PrefectGate(enabled=True)

    def look(url: str, **settings: float) -> bool:
        asked.append(url)
        return is_healthy(url, **settings)

    is_healthy = prefect_server.is_healthy
    monkeypatch.setattr(prefect_server, "is_healthy", look)
    gate.start()
    try:
        until(lambda: len(asked) >= 5)
    finally:
        gate.stop()
    assert caplog.text.count("going on without Prefect") == 1
    assert "http://127.0.0.1:9/api does not answer" in caplog.text
    assert "S3cret" not in caplog.text


def test_what_does_not_speak_http_is_no_prefect() -> None:
    for words in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"HTTP/1.1 " + b"2" * 70_000, b""):
        with answering(words) as url:
            assert not prefect_server.is_healthy(url)
    assert not prefect_server.is_healthy("http://127.0.0.1:42OO/api")

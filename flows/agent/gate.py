"""Checks in the background whether Prefect can be used, so that no job waits for it.

The gate: whether Prefect can be used now. Prefect is useful, but not needed: while its API does not
answer, or has just failed, the agent persists jobs by the same functions without it.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final

from recpoint.flows import prefect_server

__all__ = ["PrefectGate", "growing_pause"]


#: After so many doublings every pause has reached its limit. Without this bound the number would
#: leave the range of a float after a thousand failures, that is, after days of an outage.
_MOST_DOUBLINGS: Final = 20


def growing_pause(failed_before: int, *, first: float, longest: float) -> float:
    """Return the seconds until the next try; each failure in a row doubles them.

    Args:
        failed_before: how many failures in a row there were before this one.
        first: the pause after the first failure, in seconds.
        longest: the longest pause, in seconds.
    """
    return min(first * 2.0 ** min(failed_before, _MOST_DOUBLINGS), longest)


_LOG = logging.getLogger("recpoint.agent")

_LOOK_SECONDS = 2.0
_SHORTEST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 120.0

#: Settings of Prefect's client in this process, unless the user has set others: give up within
#: seconds on an API that hangs, and never start a server.
_CLIENT = {
    "PREFECT_API_REQUEST_TIMEOUT": "3",
    "PREFECT_CLIENT_MAX_RETRIES": "1",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "recpoint.persist",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    **prefect_server.OFFLINE,
}


class PrefectGate:
    """Opens once an API answers and Prefect is imported; closes for a while after each failure.

    Args:
        enabled: False: the gate stays closed.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._url: str | None = None
        self._key: str | None = None  # user and password of a configured API
        self._own_server = False
        self._awaits_server = False  # the server started here has not answered yet
        self._call: Callable[..., Any] | None = None
        self._end: Callable[..., None] | None = None
        self._open = False
        self._told_away = False  # whether the log says that Prefect is away
        self._failures = 0
        self._closed_until = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch_server, name="prefect-gate", daemon=True)

    @property
    def ui_url(self) -> str | None:
        """URL of Prefect's web UI; None: not known yet."""
        return None if self._url is None else prefect_server.ui_url(self._url)

    @property
    def api_url(self) -> str | None:
        """URL at which Prefect answers now, with its settings in the environment; None: away."""
        return self._url if self._open else None

    def start(self) -> None:
        """Start looking for an API in the background."""
        if self._enabled:
            self._thread.start()

    def stop(self) -> None:
        """Stop looking. The local server keeps running, and the log says so."""
        self._stop.set()
        server = prefect_server.running_server() if self._own_server else None
        if server is not None:
            _LOG.info(
                "the local Prefect server (process %d, %s) keeps running: recpoint server stop "
                "ends it",
                server.pid,
                prefect_server.ui_url(server.url),
            )

    def end_flow_run(self) -> Callable[..., None] | None:
        """Return `flows.persist.end_flow_run` if Prefect answered at the last check, else None."""
        return self._end if self._open else None

    def persist_flow(self) -> Callable[..., Any] | None:
        """Return `flows.persist.run_persist` if it can be called now, else None; takes ≤ 1 s."""
        if not self._open or self._url is None:
            return None
        # Asked again, because a flow would take longer to notice that the API hangs.
        if not prefect_server.is_healthy(self._url):
            self.failed("it does not answer")
            return None
        return self._call

    def worked(self) -> None:
        """Note that a flow was run: the next failure begins with the shortest pause."""
        self._failures = 0

    def failed(self, why: object) -> None:
        """Note that Prefect, not the job, failed: close the gate for a while."""
        with self._lock:
            self._open, self._told_away = False, True
            pause = growing_pause(
                self._failures, first=_SHORTEST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS
            )
            self._failures += 1
            self._closed_until = time.monotonic() + pause
        _LOG.warning("going on without Prefect for %.0f s or more: %s", pause, why)

    def _watch_server(self) -> None:
        while not self._stop.is_set():
            try:
                self._check_server()
            except Exception as error:
                # For instance, the home directory is full or read-only. No error may end this
                # thread, or the gate would keep its state for ever.
                self.failed(f"{type(error).__name__}: {error}")
            self._stop.wait(_LOOK_SECONDS)

    def _check_server(self) -> None:
        if time.monotonic() < self._closed_until:
            return
        if self._url is None or self._own_server:
            self._find_server()
        if time.monotonic() < self._closed_until:
            return
        if self._url is not None and prefect_server.is_healthy(self._url, timeout_seconds=2.0):
            if self._call is None:
                self._call = self._import(self._url)
            self._awaits_server = False
            if not self._open:
                _LOG.info("Prefect is at %s", self.ui_url)
                self._open, self._told_away = True, False
        else:
            # No warning while the server that was started here is still starting up.
            if self._url is not None and not self._told_away and not self._awaits_server:
                self._told_away = True
                _LOG.warning(
                    "going on without Prefect until it is back: %s does not answer", self._url
                )
            self._open = False

    def _find_server(self) -> None:
        if self._url is None:
            url = prefect_server.configured_url()
            if url is not None:
                self._url, self._key = prefect_server.without_key(url), prefect_server.key_of(url)
                return
        self._own_server = True
        server = prefect_server.running_server()
        if server is None and self._awaits_server:
            self._awaits_server = False
            log = prefect_server.server_directory() / "server.log"
            self.failed(f"the local server ended before it answered; see {log}")
            return
        if server is None:
            self._awaits_server = True
            server = prefect_server.start_server()
        if self._call is not None and self._url not in (None, server.url):
            # Prefect reads its settings once in a process, so the new port needs a new process.
            _LOG.warning("the Prefect server moved to %s; restart the agent to use it", server.url)
            self._enabled = False
            self._stop.set()
        self._url = server.url

    def _import(self, url: str) -> Callable[..., Any]:
        if "prefect" not in sys.modules:
            os.environ["PREFECT_API_URL"] = url
            if self._key is not None:
                # Not left in the URL: Prefect would log it there, and would send its events without
                # it, so that the server refuses them.
                basic = b64encode(self._key.encode()).decode()
                headers = json.dumps({"Authorization": f"Basic {basic}"})  # for a proxy
                os.environ.setdefault("PREFECT_API_AUTH_STRING", self._key)
                os.environ.setdefault("PREFECT_CLIENT_CUSTOM_HEADERS", headers)
            if self._own_server:
                os.environ.setdefault("PREFECT_HOME", str(prefect_server.server_directory()))
                # Our own server does not ask for the tokens, so the client need not fetch them.
                os.environ.setdefault("PREFECT_CLIENT_CSRF_SUPPORT_ENABLED", "false")
            for name, value in _CLIENT.items():
                os.environ.setdefault(name, value)
        # httpx logs a line for each request, and a checkpoint takes a dozen requests.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        collects = gc.isenabled()
        gc.disable()  # an import makes no garbage, and looking for it takes a fifth of the time
        try:
            module = importlib.import_module("recpoint.flows.persist")
        finally:
            if collects:
                gc.enable()
        self._end = module.end_flow_run
        call: Callable[..., Any] = module.run_persist
        return call

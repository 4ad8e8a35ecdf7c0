"""Runs Debian's Prometheus for tests, which skip if it is missing: apt-get install prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from recpoint.testing.seaweed import free_ports
from tests.polling import PATIENCE_SECONDS, until

__all__ = ["PrometheusServer", "free_port", "needs_prometheus"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool here (Debian: apt-get install prometheus)",
)

_CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs: [{jobs}]
"""
_JOB = "{{job_name: {name}, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}"


def free_port() -> int:
    """Return a port where nobody listens, and which the system gives to no outgoing connection."""
    return free_ports(1)


class PrometheusServer:
    """A Prometheus server on the loopback, which is killed at the end of the block.

    Args:
        directory: for the server's files.
        rules: path of the rule file.
        jobs: name of a job -> port of its target.
    """

    def __init__(self, directory: Path, *, rules: Path, jobs: Mapping[str, int]) -> None:
        targets = ", ".join(_JOB.format(name=name, port=port) for name, port in jobs.items())
        config = directory / "prometheus.yml"
        config.write_text(_CONFIG.format(rules=rules, jobs=targets))
        self._log = directory / "prometheus.log"
        self._port = free_port()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        until(self._is_ready)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query; a refused query fails with the reason."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Return all alert rules, with their health and the alerts that they raise."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        return {rule["name"] for rule in self.rules() if rule["state"] == "firing"}

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert document["status"] == "success", document
        return document["data"]

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5).close()
        except OSError:
            return False
        return True

"""Scrapes metrics, parsed by prometheus_client's own parser, and runs an agent to scrape."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.forked_program import ForkedProgram, be_module
from tests.polling import PATIENCE_SECONDS, until

__all__ = ["MetricsAgent", "Samples", "scrape", "value"]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    """Return the samples at a URL, by name and labels."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """Return the value of the only sample with this name and these labels; None: there is none."""
    matching = [
        number
        for (sample_name, have), number in samples.items()
        if sample_name == name and labels.items() <= dict(have).items()
    ]
    assert len(matching) < 2, f"{len(matching)} samples of {name}"
    return matching[0] if matching else None


class MetricsAgent:
    """`recpoint agent --metrics-port 0`, in a forked process; killed at the end of the block.

    Args:
        staging: the staging area.
        log: file for its log.
        port: of the metrics; 0: any. After a restart, give the port that is scraped.
        environment: variables added to this process's environment.
    """

    def __init__(
        self, staging: Path, log: Path, *, port: int = 0, environment: Mapping[str, str] = {}
    ) -> None:
        self._log = log
        self._from = log.stat().st_size if log.exists() else 0
        inherited = {name: text for name, text in os.environ.items() if "PREFECT" not in name}
        options = ["--prefect", "off", "--metrics-port", str(port), "--metrics-refresh", "0.2"]
        self.process = ForkedProgram(
            be_module,
            ["recpoint", "agent", "--staging", str(staging), *options],
            environment=inherited | dict(environment),
            output=(log, log),
        )

    @property
    def url(self) -> str:
        """Wait until the agent logs the URL of its metrics, and return the URL."""

        def told() -> str | None:
            assert self.process.poll() is None, self._log.read_text()
            output = self._log.read_bytes()[self._from :].decode(errors="replace")
            match = re.search(r"metrics: (http\S+)", output)
            return None if match is None else match[1]

        return until(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

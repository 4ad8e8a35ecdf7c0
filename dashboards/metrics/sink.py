"""Collects and serves metrics of a sink and its publisher: `recpoint publish-to --metrics-port`."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from recpoint.counting import CAUSES, cause_of
from recpoint.dashboards.metrics.export import MetricsExport, SampleCollector
from recpoint.dashboards.metrics.samples import Samples
from recpoint.dashboards.metrics.table import SINK_METRICS
from recpoint.errors import RecpointError
from recpoint.serving.sinks.publisher import SinkPublisher

__all__ = ["SinkMetrics"]

_MS_PER_SECOND: Final = 1000.0


class SinkMetrics:
    """Serves how far a sink is behind its run, while a publisher looks at both.

    Args:
        publisher: brings versions; it is only looked at.
        run: the run URL.
        sink: URL of the sink, without a password.
        port: TCP port; 0: any free port.
        address: where to listen.

    Attributes:
        url: where the metrics are served.

    Raises:
        SettingsError: the server cannot listen there.
    """

    def __init__(
        self, publisher: SinkPublisher, *, run: str, sink: str, port: int, address: str
    ) -> None:
        self._publisher = publisher
        self._labels = {"run": run, "sink": sink}
        self._began_seconds = time.time()
        self._failures: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        collector = SampleCollector(SINK_METRICS, self._sample)
        self._export = MetricsExport(collector, registry=None, port=port, address=address)
        self.url = self._export.url

    def note_failure(self, error: RecpointError) -> None:
        """Count a look that ended with an error."""
        self._failures[cause_of(error)] += 1

    def _sample(self, samples: Samples) -> None:
        standing = self._publisher.standing
        samples.add_each(
            "recpoint_sink_failures_total",
            list(self._failures.items()),
            label="cause",
            **self._labels,
        )
        # Without a look, the start: an alert on an absent series would never fire.
        looked = self._began_seconds if standing is None else standing.looked_ms / _MS_PER_SECOND
        samples.add("recpoint_sink_look_timestamp_seconds", looked, **self._labels)
        if standing is None:
            return
        samples.add("recpoint_sink_lag_seconds", standing.lag_seconds, **self._labels)
        if standing.committed is not None:
            step = standing.committed.version.checkpoint.step
            samples.add("recpoint_sink_step", step, **self._labels)
            deferred = standing.committed.deferred
            missed = 0 if deferred is None else standing.committed.number - deferred.oldest_number
            rows = 0 if deferred is None else deferred.rows
            size_bytes = 0 if deferred is None else deferred.size_bytes
            samples.add("recpoint_sink_deferred_rows", rows, **self._labels)
            samples.add("recpoint_sink_deferred_bytes", size_bytes, **self._labels)
            samples.add("recpoint_sink_deferred_versions", missed, **self._labels)

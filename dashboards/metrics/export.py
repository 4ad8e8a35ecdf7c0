"""Exports metrics with prometheus_client: a collector that reads values on scrape, and a server.

Nothing is counted or kept here: a scrape reads what the trainer or the agent counts anyway.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from math import inf

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from recpoint.closing import Closing
from recpoint.counting import HistogramReading
from recpoint.dashboards.metrics import table
from recpoint.dashboards.metrics.samples import MetricSample, Samples
from recpoint.errors import SettingsError

__all__ = ["MetricsExport", "SampleCollector", "require_registry"]


_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class SampleCollector(Collector):
    """Collects samples at each scrape, under the names in the table of metrics.

    Args:
        metrics: all metrics that may have samples.
        look: adds the current samples; called from the threads of scrapes.
    """

    def __init__(
        self, metrics: Sequence[table.ExposedMetric], look: Callable[[Samples], None]
    ) -> None:
        self._metrics = metrics
        self._look = look

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without samples, so that registering them reads no values."""
        return iter([_family(metric) for metric in self._metrics])

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current samples."""
        samples = Samples()
        samples.add("recpoint_build_info", 1, version=version("recpoint"))
        self._look(samples)
        unknown = samples.by_metric.keys() - {metric.name for metric in self._metrics}
        if unknown:
            raise KeyError(f"no such metrics: {sorted(unknown)}")
        for metric in self._metrics:
            family = _family(metric)
            for sample in samples.by_metric.get(metric.name, ()):
                _add(family, metric, sample)
            yield family


def require_registry(registry: object) -> None:
    """Raise SettingsError if `registry` is not a registry of prometheus_client."""
    if not isinstance(registry, CollectorRegistry):
        raise SettingsError(
            "registry",
            found=type(registry).__name__,
            expected="a prometheus_client.CollectorRegistry",
            next_step="registry=prometheus_client.REGISTRY, or port=9401 to have them served",
        )


class MetricsExport(Closing):
    """Exports metrics until `close`.

    Attributes:
        url: where they are served; None: they are in the registry that was given.
    """

    def __init__(
        self,
        collector: SampleCollector,
        *,
        registry: CollectorRegistry | None,
        port: int | None,
        address: str,
    ) -> None:
        self._collector = collector
        self._registry = CollectorRegistry(auto_describe=True) if registry is None else registry
        try:
            self._registry.register(collector)
        except ValueError as error:
            raise SettingsError(
                "registry",
                found=f"metrics of another Checkpointer: {error}",
                expected="one Checkpointer for each registry",
                next_step="give each Checkpointer a registry or a port of its own",
            ) from error
        self._registered = True
        self._server: MetricsServer | None = None
        if registry is None:
            ProcessCollector(registry=self._registry)
        if port is not None:
            self._server = MetricsServer(self._registry, port=port, address=address)
        self.url = None if self._server is None else self._server.url

    def close(self) -> None:
        """Stop serving and leave the registry; a second call does nothing."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._registered:
            self._registry.unregister(self._collector)
            self._registered = False


#: The servers that this process runs; a forked child closes its copies of their sockets.
_serving: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


class MetricsServer:
    """Serves a registry over HTTP, from daemon threads.

    Args:
        registry: holds the metrics to serve.
        port: TCP port; 0: any free port.
        address: where to listen.

    Raises:
        SettingsError: the server cannot listen there.
    """

    def __init__(self, registry: CollectorRegistry, *, port: int, address: str) -> None:
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"metrics at {address}:{port}",
                found=str(error),
                expected="an address of this host and a port that is free",
                next_step="give another port, or stop what listens there; 0 takes any",
            ) from error
        host, bound_port = self._server.server_address[:2]
        named = f"[{host!s}]" if ":" in str(host) else str(host)
        self.url = f"http://{named}:{bound_port}/metrics"
        _serving.add(self)

    def close(self) -> None:
        """Stop listening, and wait for the server's thread to end."""
        _serving.discard(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget_socket(self) -> None:
        """Close the socket in a forked child.

        Otherwise a reader's worker that outlives its trainer would keep the port.
        """
        self._server.socket.close()


def _after_fork() -> None:
    for server in list(_serving):
        server.forget_socket()


os.register_at_fork(after_in_child=_after_fork)


def _family(metric: table.ExposedMetric) -> _Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    if metric.kind == "gauge":
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)


def _add(family: _Family, metric: table.ExposedMetric, sample: MetricSample) -> None:
    labels = [_writable(sample.labels[name]) for name in metric.labels]
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(sample.value, HistogramReading)
        family.add_metric(labels, _buckets(sample.value), sample.value.total)
    else:
        assert not isinstance(sample.value, HistogramReading)
        family.add_metric(labels, sample.value)


def _writable(label: str) -> str:
    """Escape what UTF-8 cannot encode, because such a name would fail the whole scrape."""
    return label.encode(errors="backslashreplace").decode()


def _buckets(reading: HistogramReading) -> list[tuple[str, float]]:
    """Return (upper bound, cumulative count) pairs, as the exposition format requires."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*reading.bounds, inf), reading.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == inf else str(bound), total))
    return buckets

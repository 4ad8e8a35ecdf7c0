"""Collects and exports a training process's metrics for Prometheus: `recpoint.export_metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recpoint.dashboards.metrics.samples import Samples, require_prometheus
from recpoint.dashboards.metrics.table import TRAINER_METRICS
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.checkpointer import Checkpointer
from recpoint.trainer_plugin.observation import Observation

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from recpoint.dashboards.metrics.export import MetricsExport

__all__ = ["export_metrics"]


def export_metrics(
    checkpointer: Checkpointer,
    *,
    port: int | None = None,
    address: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
) -> MetricsExport:
    """Export the metrics of a Checkpointer to Prometheus, from now until the process ends.

        recpoint.export_metrics(checkpoints, port=9401)                        # a server of its own
        recpoint.export_metrics(checkpoints, registry=prometheus_client.REGISTRY)  # one you serve

    `step()` does no work for this: a scrape reads, in its own thread and without a lock, what the
    Checkpointer counts anyway. docs/metrics.md lists the metrics.

    Args:
        checkpointer: started, or about to be.
        port: TCP port of an HTTP server for the metrics; 0: any free port, named by the `url` of
            the returned export.
        address: where to listen; by default only this host can connect. Whoever can connect can
            read the metrics.
        registry: where to add the metrics; the caller serves, pushes or writes this registry.

    Returns:
        The export, whose `close` ends it early. The caller need not keep it.

    Raises:
        SettingsError: prometheus_client is not installed, the port is taken, or both or neither of
            `port` and `registry` are given.
    """
    if (port is None) == (registry is None):
        raise SettingsError(
            "export_metrics",
            found="neither port nor registry" if port is None else "both port and registry",
            expected="one of them",
            next_step="port=9401 to have them served, registry=REGISTRY to serve them yourself",
        )
    require_prometheus("export_metrics")
    from recpoint.dashboards.metrics.export import MetricsExport, SampleCollector, require_registry

    if registry is not None:
        require_registry(registry)

    collector = SampleCollector(
        TRAINER_METRICS, lambda samples: _sample(samples, checkpointer.observe())
    )
    return MetricsExport(collector, registry=registry, port=port, address=address)


def _sample(samples: Samples, observation: Observation) -> None:
    run = observation.run

    def add(name: str, value: float | None) -> None:
        samples.add(f"recpoint_trainer_{name}", value, run=run)

    add("running", int(observation.running))
    add("lag_seconds", observation.lag_seconds)
    add("lag_batches", observation.lag_batches)
    add("interval_seconds", observation.interval_seconds)
    add("batches_total", observation.batches)
    add("pending_checkpoints", observation.pending)
    add("restores_total", observation.restores)
    add("unmarked_rows_total", observation.unmarked_rows)
    add("agent_running", int(observation.agent_running))
    add("staging_free_bytes", observation.staging_free_bytes)
    add("staging_bound_bytes", observation.staging_bound_bytes)
    if observation.last_commit_ms is not None:
        add("last_commit_timestamp_seconds", observation.last_commit_ms / 1000)
    samples.add("recpoint_trainer_stall_seconds", observation.stalls, run=run)
    for unit, copied in (("rows", observation.copied_rows), ("bytes", observation.copied_bytes)):
        name = f"recpoint_trainer_copied_{unit}_total"
        samples.add_each(name, copied.items(), label="when", run=run)
    cache = observation.cache
    if cache is not None:
        lookups = {"hit": cache.hits, "miss": cache.misses}
        samples.add_each(
            "recpoint_trainer_cache_lookups_total", lookups.items(), label="result", run=run
        )
        rows = {"fetched": cache.fetched_rows, "written": cache.written_rows}
        samples.add_each("recpoint_trainer_cache_rows_total", rows.items(), label="way", run=run)
        sizes = {"fetched": cache.fetched_bytes, "written": cache.written_bytes}
        samples.add_each("recpoint_trainer_cache_bytes_total", sizes.items(), label="way", run=run)
        late_rows = cache.reduced_rows - cache.reduced_at_once
        reduced = {"step": cache.reduced_at_once, "next_batch": late_rows}
        samples.add_each(
            "recpoint_trainer_cache_reduced_rows_total", reduced.items(), label="when", run=run
        )
        add("cache_wait_seconds_total", cache.wait_seconds)
        add("cache_window_batches", cache.window)
        add("lost_servers", cache.lost_servers)
        add("lost_rows", cache.lost_rows)
    for table, counts in observation.keyed.items():
        samples.add("recpoint_trainer_keyed_rows", counts.rows_used, run=run, table=table)
        keys = {name: getattr(counts, name) for name in ("inserted", "evicted", "refused")}
        samples.add_each(
            "recpoint_trainer_keys", keys.items(), label="result", run=run, table=table
        )
    for server in () if observation.servers is None else observation.servers.each:
        number = str(server.number)
        found_rows = {"rows": server.rows, "known_rows": server.known_rows}
        for name, rows_there in found_rows.items():
            samples.add(f"recpoint_trainer_server_{name}", rows_there, run=run, server=number)
        if server.whole_ms is not None:
            name = "recpoint_trainer_server_whole_timestamp_seconds"
            samples.add(name, server.whole_ms / 1000, run=run, server=number)
    results = {
        "committed": observation.committed,
        "skipped": observation.skipped,
        "cancelled": observation.cancelled,
        "failed": observation.failed,
    }
    samples.add_each("recpoint_trainer_checkpoints_total", results.items(), label="result", run=run)
    samples.add_each(
        "recpoint_trainer_stored_bytes_total",
        observation.stored_bytes.items(),
        label="kind",
        run=run,
    )
    samples.add_each(
        "recpoint_trainer_failures_total", observation.failures.items(), label="cause", run=run
    )

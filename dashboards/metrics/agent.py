"""Collects and serves an agent's metrics for Prometheus: `recpoint agent --metrics-port`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from recpoint.dashboards.catalog_watch import REFRESH_SECONDS, CatalogWatch
from recpoint.dashboards.metrics.export import MetricsExport, SampleCollector
from recpoint.dashboards.metrics.samples import Samples
from recpoint.dashboards.metrics.table import AGENT_METRICS
from recpoint.flows.agent.agent import Agent
from recpoint.flows.agent.observation import AgentObservation, RunObservation

__all__ = ["TROUBLES", "agent_metrics"]


#: The kinds of failures in a catalog on which somebody has to act.
TROUBLES: Final = ("validation", "manifest", "chain")

_LOG = logging.getLogger("recpoint.metrics")


def agent_metrics(
    *, port: int, address: str = "127.0.0.1", refresh_seconds: float = REFRESH_SECONDS
) -> Callable[[Agent], AbstractContextManager[object]]:
    """Return the argument `watch` of `run_agent` that serves the agent's metrics while it runs.

    Args:
        port: TCP port; 0: any free port, which the log names.
        address: where to listen.
        refresh_seconds: between two reads of a run's catalog.

    Raises (on entry):
        SettingsError: the server cannot listen there.
    """

    @contextmanager
    def serve(agent: Agent) -> Iterator[None]:
        catalog = CatalogWatch(lambda: _urls(agent.observe()), refresh_seconds=refresh_seconds)
        collector = SampleCollector(
            AGENT_METRICS, lambda samples: _sample(samples, agent.observe(), catalog)
        )
        try:
            with MetricsExport(collector, registry=None, port=port, address=address) as export:
                _LOG.info("metrics: %s", export.url)
                yield
        finally:
            catalog.stop()

    return serve


def _urls(observation: AgentObservation) -> list[str]:
    return [run.run for run in observation.runs if run.has_url]


def _sample(samples: Samples, observation: AgentObservation, catalog: CatalogWatch) -> None:
    samples.add("recpoint_agent_prefect_up", int(observation.prefect))
    samples.add("recpoint_agent_staging_free_bytes", observation.staging_free_bytes)
    samples.add("recpoint_agent_staging_size_bytes", observation.staging_size_bytes)
    for run in observation.runs:
        _sample_run(samples, run)
        if run.has_url:
            _sample_catalog(samples, run.run, catalog)


def _sample_run(samples: Samples, observation: RunObservation) -> None:
    run, facts = observation.run, observation.facts

    def add(name: str, value: float | None) -> None:
        samples.add(f"recpoint_agent_{name}", value, run=run)

    add("staged_jobs", observation.staged_jobs)
    add("queue_age_seconds", observation.queue_age_seconds)
    add("full_bytes_total", facts.full_bytes)
    add("chain_length", facts.links_to_read)
    add("consolidations_total", observation.consolidations)
    add("missing_ranks", observation.missing_ranks)
    add("trainer_running", int(observation.trainer == "training"))
    add("trainer_lost", int(observation.trainer == "lost"))
    if facts.last_commit_ms is not None:
        add("last_commit_timestamp_seconds", facts.last_commit_ms / 1000)
    samples.add("recpoint_agent_commit_lag_seconds", facts.commit_lag.read(), run=run)
    samples.add_each("recpoint_agent_jobs_total", facts.jobs.items(), label="result", run=run)
    samples.add_each(
        "recpoint_agent_failures_total", facts.failures.items(), label="cause", run=run
    )
    samples.add_each(
        "recpoint_agent_stored_bytes_total", facts.stored_bytes.items(), label="kind", run=run
    )


def _sample_catalog(samples: Samples, run: str, catalog: CatalogWatch) -> None:
    def add(name: str, value: float | None) -> None:
        samples.add(f"recpoint_catalog_{name}", value, run=run)

    samples.add_each(
        "recpoint_catalog_refresh_failures_total",
        catalog.failures(run).items(),
        label="cause",
        run=run,
    )
    since_ms = catalog.since_ms(run)
    add("watch_start_timestamp_seconds", None if since_ms is None else since_ms / 1000)
    facts = catalog.facts(run)
    if facts is None:
        return
    view = facts.overview
    add("refresh_timestamp_seconds", view.refreshed_ms / 1000)
    add("checkpoints", view.live_checkpoints)
    add("created_timestamp_seconds", facts.created_ms / 1000)
    add("restarts", view.restarts)
    add("ended", int(view.ended is not None))
    add("restore_manifests", view.restore.manifests_to_read if view.restore else None)
    add("restore_bytes", view.restore.bytes_to_read if view.restore else None)
    widths = None if view.newest is None else view.newest.widths
    add("value_bits", None if widths is None else widths.mean_bits)
    uses = None if view.newest is None else view.newest.keyed
    for use in () if uses is None else uses.tables:
        labels = {"run": run, "table": use.table}
        samples.add("recpoint_catalog_keyed_rows", use.used, **labels)
        samples.add("recpoint_catalog_keyed_capacity_rows", use.capacity_rows, **labels)
        for result in ("inserted", "evicted", "refused"):
            count = getattr(use, result)
            samples.add("recpoint_catalog_keys", count, **labels, result=result)
    kinds = [failure.kind for failure in view.failures]
    troubles = ((kind, kinds.count(kind)) for kind in TROUBLES)
    samples.add_each("recpoint_catalog_troubles", troubles, label="kind", run=run)
    if facts.last_validation_ms is not None:
        add("last_validation_timestamp_seconds", facts.last_validation_ms / 1000)

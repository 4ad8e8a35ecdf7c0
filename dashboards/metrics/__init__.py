"""Exports metrics of trainers and agents for Prometheus.

Walk: `table` (every metric by name), `trainer` and `agent` (where values come from), `export`
(a collector and its server), `library` (what to say where prometheus_client is missing).
"""

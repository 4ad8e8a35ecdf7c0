"""Exports metrics of trainers and agents for Prometheus.

Walk: `table` (every metric by name), `trainer` and `agent` (where values come from), `export`
(a collector and its server), `samples` (values on their way there).
"""

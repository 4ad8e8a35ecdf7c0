"""Exports metrics of trainers and agents for Prometheus.

Walk: `table` (every metric by name), `trainer` and `agent` (where values come from), `samples`
(values on their way to the collector), `export` (the collector and its server).
"""

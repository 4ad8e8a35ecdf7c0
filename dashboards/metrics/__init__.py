"""Exports metrics of trainers, agents and publishers for Prometheus.

Walk: `table` (every metric by name), `trainer`, `agent` and `sink` (where values come from),
`samples` (values on their way to the collector), `export` (the collector and its server).
"""

"""Describes a run from its catalog, for pages, commands and metrics.

Its input is a run, its output figures and failures. Read the modules in this order: `overview`
(computes the figures), `troubles` (collects failures), `watch` (refreshes an overview, and reads
only new records).
"""

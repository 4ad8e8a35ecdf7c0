"""Describes a run from its catalog, for pages, commands and metrics.

Its input is a run, its output figures and failures. Read the modules in this order: `overview`
(what is told of a run), `figures` (computes it, with `width_mix` and `keys_of_tables`), `alarms`
(what is wrong), `troubles` (collects failures, and the newest retention's plan), `watch` (refreshes
an overview, and reads only new records), with `appearances` (the age of objects).
"""

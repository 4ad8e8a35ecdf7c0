"""Runs inside a serving process: follows a run, and serves whole versions. Never imports Prefect.

A run comes in, a model that requests may read goes out. Walk: `follower`, `goal` (which version),
`route` (the cheapest way to it), `update` and `loading` (read what the route names), `standing`
(how far behind a version is), `version` (what requests look at), `model` (the two copies), `tables`
(one table in memory, as values or as codes that lookups decode), `keyed_table` (rows by key),
`lookups` (a model's embeddings that look up codes or keys), `collisions` (raw ids to rows).
"""

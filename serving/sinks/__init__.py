"""Publishes whole versions of a run into stores that serving reads: Redis, SQLite, Parquet.

A run and a sink's own position come in, a sink at a newer version goes out. Walk: `contract` (what
a sink is), `records` (how it names versions), `row_bytes` (how it stores rows), `sqlite`,
`redis_sink` with `redis_keys`, `redis_reading` and `redis_scripts`, and `parquet_directory` with
`parquet_files` (three sinks), `row_stream` (rows of a chain, one after another), `budgeted` (which
of them come with a version) with `most_changed` (the choice) and `backlog` (which do not, as a sink
records it), `publisher` (brings a sink to the version that is to be served), `opening` (from a URL
to a sink), `reader` (lookups in a serving process), `verification` (compares a sink with its
checkpoint, row by row).
"""

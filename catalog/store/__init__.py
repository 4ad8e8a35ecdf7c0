"""Keeps the objects of a run, in a directory, in S3, or behind fsspec.

A URL comes in, a `Store` goes out; every other package reads and writes through it. Walk:
`contract` (what a store promises), `durable` (writes that survive a crash), `local` and `s3` (the
two main implementations), `retrying` (repeats failed calls of any store), `run_url` (which URLs are
accepted), `store` (opens the store of a URL), `scheduler` (runs several reads or writes at once in
bounded memory), `records` (reads, lists and creates records of any kind).
"""

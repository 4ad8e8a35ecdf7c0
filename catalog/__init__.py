"""Defines what is stored, and the order in which it is written, read, checked and deleted.

`format` defines the bytes and records. The packages build on each other in this order, lowest
first: `store` keeps objects, `run` reads a run's records and chains, `staging` is the directory
that trainer and agent share on a host, `restore` reads a chain into a target, `persist` commits a
staged job, with the rows that its residuals are taken from, `check` proves that a run restores,
`consolidate` shortens chains, `retention` removes checkpoints and objects that are not needed,
`overview` describes a run from its catalog.
"""

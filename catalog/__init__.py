"""Defines what is stored, and the order in which it is written, read, checked and deleted.

Bytes and records come from `format`; the packages stand on each other in this order, lowest
first: `store` keeps objects, `run` knows a run by its records and chains, `staging` is what trainer
and agent share on a host, `persist` commits a staged job, `restore` reads a chain into a target,
`check` proves that it restores, `consolidate` shortens chains, `retention` removes what is not
kept or needed, `overview` describes a run from its catalog alone.
"""

"""Reads and writes a run's records and manifests, and resolves the chains of its checkpoints.

A store comes in, a `Run` goes out. Walk: `run` (opens it), `lineage` (generations and the live
line), `chain` (which manifests a checkpoint needs), `commit` (creates a manifest),
`representations` (several manifests of one checkpoint), then the records about checkpoints:
`leases`, `pins`, `publications`, `validations`, `deletions`; `facts` (collects what retention
needs); last `repair`, for lost records.
"""

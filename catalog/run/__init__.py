"""Knows a run by what is stored of it: records, manifests, chains, and what is said of them.

A store comes in, a `Run` goes out. Walk: `run` (opening it), `lineage` (generations and the live
line), `chain` (which manifests a checkpoint needs), `commit` (one more manifest),
`representations` (several manifests of one checkpoint), then what is written about checkpoints:
`leases`, `pins`, `publications`, `validations`, `deletions`, `facts`; last `repair`, for records
that were lost.
"""

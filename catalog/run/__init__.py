"""Reads and writes a run's records and manifests, and resolves the chains of its checkpoints.

A store comes in, a `Run` goes out. Walk: `run` and `run_record` (open it), `lineage` (generations
and the live line), `chain` and `manifests_ahead` (which manifests a checkpoint needs), `commit`
(creates a manifest) with `stored_chunks` and `committed`, `representations` (several manifests of
one checkpoint), then the records about checkpoints: `ends`, `leases`, `pins`, `metrics`,
`publications`, `validations`, `known_damage`, `rejections`, `deletions` and `going`; `facts`
(collects what retention needs); last, for lost records, `lost_manifests`, `gone_manifests`,
`relink` and `line_to_go_on`.
"""

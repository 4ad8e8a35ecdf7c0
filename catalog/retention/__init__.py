"""Removes what is not kept, and what nobody needs.

A run and rules come in, a plan with a reason for each object goes out, and is executed once.
Walk: `keep` (which checkpoints and manifests stay), `prune` (marks, the grace, deletion), `sweep`
(chunks that no manifest needs), `sweep_here` (the same from a host, with what is staged there),
`staged` and `finish_staged` (jobs that nobody attends to).
"""

"""Removes checkpoints that no rule keeps, and objects that nobody needs.

Its input is a run and rules, its output a plan with a reason for each object, which is executed
once. Read the modules in this order: `rules` and `keep` (decide which checkpoints and manifests
stay), `grace`, `marks`, `plan` (what is marked, waits and goes), `stored_plan`, `prune` (marks) and
`delete`; `sweep` with `named_chunks` (removes chunks that no manifest needs), `sweep_here`
(does so from a host, with its staged jobs), `staged`, `finish_staged` and `discard_staged` (handle
staged jobs without a trainer or agent).
"""

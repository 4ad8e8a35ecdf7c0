"""Removes checkpoints that no rule keeps, and objects that nobody needs.

Its input is a run and rules, its output a plan with a reason for each object, which is executed
once. Read the modules in this order: `keep` (decides which checkpoints and manifests stay), `prune`
(marks, waits for the grace, deletes), `sweep` (removes chunks that no manifest needs), `sweep_here`
(does so from a host, with its staged jobs), `staged` and `finish_staged` (handle staged jobs
without a trainer or agent).
"""

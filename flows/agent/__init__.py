"""Runs on each training host and persists its staged jobs, also while Prefect is away.

Staged jobs come in, committed checkpoints go out. Walk: `agent` (the loop), `jobs` (one run's
jobs, in order), `runs` (the state of each run), `gate` (whether Prefect can be used),
`consolidations` and `sweeps` (work that waits for idle times), `consolidate_process` and
`sweep_process` (the child processes of that work) with `children`, `observation` (the metrics).
"""

"""Runs on each training host and persists its staged jobs, also while Prefect is away.

Staged jobs come in, committed checkpoints go out. Walk: `agent` (the loop), `queue` (which job is
next), `jobs` (one run's jobs, in order), `persist` (one job), `runs` (the state of each run),
`waiting_jobs`, `failed_jobs`, `ended_trainings`, `gate` (whether Prefect can be used),
`consolidations` and `sweeps` (work that waits for idle times) with `background`,
`consolidate_process` and `sweep_process` (the child processes of that work) with `children`,
`observation` (the metrics).
"""

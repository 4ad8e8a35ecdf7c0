"""Runs on each training host: takes staged jobs to the store, whatever Prefect is doing.

Staged jobs come in, committed checkpoints go out. Walk: `agent` (the loop), `jobs` (one run's
jobs, in order), `runs` (what it knows of each run), `gate` (whether Prefect can be used),
`consolidations` and `sweeps` (work that waits for idle times), `children` with the entries
`consolidate_process` and `sweep_process` (that work's own processes), `observation` (its metrics).
"""

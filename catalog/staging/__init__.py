"""Holds checkpoints on their way from a trainer to its agent, in a directory of their host.

A trainer puts slots and job files in, an agent takes them out. Walk: `owned` (opens only files of
this user), `locks`, `area` (where a run's files lie), `job_files`, `cancels`, `notes` and
`trainer_note`, `job` and `slot_reading` (check a slot against its job file, and read it),
`agent_lock` (of the process that finishes jobs) and `agent_trouble`, `servers` (what a trainer says
of its embedding servers), `free` (gives slots back).
"""

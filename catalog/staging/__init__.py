"""Holds checkpoints on their way from a trainer to its agent, in a directory of their host.

A trainer puts slots and job files in, an agent takes them out. Walk: `owned` (opens only files of
this user), `locks`, `area` (paths, the queue, cancel marks and notes), `job` (checks a slot against
its job file), `agent` (the lock of the process that finishes jobs), `servers` (what a trainer says
of its embedding servers), `free` (gives slots back).
"""

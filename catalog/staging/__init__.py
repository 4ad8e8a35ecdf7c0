"""Holds checkpoints on their way from a trainer to its agent, in a directory of their host.

A trainer puts slots and job files in, an agent takes them out. Walk: `owned` (files that only
this user can have made), `locks`, `area` (paths, the queue, cancel marks and notes), `job` (what a
job file says and its slot holds), `agent` (who finishes jobs), `free` (giving slots back).
"""

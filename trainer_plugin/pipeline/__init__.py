"""Takes a due checkpoint up to its hand-over to the agent, and learns its outcome.

Read the modules in this order: `pipeline` (checks for room, cuts, hands over), `busy` (what happens
if there is no room), `handoff` (digests, fsync and the job file, in the background), `outcomes`
(the agent's answers) and `reader_pace` (how far the reader may read until the next checkpoint).
"""

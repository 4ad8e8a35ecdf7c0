"""Takes a due checkpoint to its hand-over, and learns what became of it.

Walk: `pipeline` (is there room, cut, hand over), `handoff` (digests, fsync and the job file,
in the background), `outcomes` (the agent's answers), `reader_pace` (how far the
reader may read until then).
"""

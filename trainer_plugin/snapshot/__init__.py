"""Takes one consistent cut of a training into a slot of the staging area.

Marked rows and states come in, a slot and a job file go out. Walk: `cut` (the three steps),
`live_tables` (the tables as they are at the cut), `plan` (what goes where), `copy`, `seal`
(digests and the job file), `codes` (tables that are quantized where they live), `staging` (slots
and their files), `memory_bound` (how much they may take), `unmarked_rows` (a search for changes
that nothing has marked).
"""

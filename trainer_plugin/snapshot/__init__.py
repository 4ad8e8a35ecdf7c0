"""Takes one consistent cut of a training into a slot of the staging area.

The input is marked rows and states; the output is a slot and a job file. Read the modules in this
order: `cut` (the three steps), `live_tables` (the tables as they are at the cut), `plan` (what goes
where in the slot), `table_parts` (how each table is stored), `cache_at_cut` (tables in a cache),
`copy`, `seal` (digests and the job file), `codes` (tables quantized on their own device),
`device_memory` (what buffers may take of a GPU), `warm_up` (compiles GPU kernels before training),
`staging` (slots and their files), `area_room` (whether they have room), `large_pages`,
`memory_bound` (the most memory that slots take), `record_bound` (whether records of a checkpoint
keep to the format's limit), `moved_memory` (ends copies before their memory goes), `host_memory`
(the memory that the host can give) and `unmarked_rows` (a search for changes that nothing has
marked).
"""

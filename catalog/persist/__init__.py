"""Takes a staged job to a committed checkpoint.

A job file comes in, a manifest in the store goes out. Walk: `persist` (one driver of the steps,
for a flow and for an agent without Prefect), `plan` (which chunks), `quantize`, `encode` (chunks
into the spool and into the store), `spool` (the files in between), `ranks` (parts of several ranks
joined to one checkpoint).
"""

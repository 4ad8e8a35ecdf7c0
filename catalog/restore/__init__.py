"""Reads a stored chain into a target, each row once, newest first.

Its input is a run and a selection, its output filled tensors or files. Read the modules in this
order: `order` (chooses the checkpoint), `restore` (the entry point), `target` (what a target must
offer), `chain` (reads a chain table by table), `chunks` (reads and checks chunks), `rows` (which
rows a chunk holds, and which are newest), `placement` (writes rows into tensors), `dense` and
`state` (everything except rows), `in_place` (writes into live tensors), `files` (writes safetensors
files) with `shard_plan`, `shard_place` and `state_tensors`.
"""

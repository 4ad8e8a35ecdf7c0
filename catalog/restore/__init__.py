"""Reads a stored chain into a target, each row once, newest first.

A run and a selection come in, filled tensors or files go out. Walk: `order` (which checkpoint),
`restore` (the whole way), `target` (what a target must offer), `chain` (a chain, table by table),
`chunks` (checked rows of a chunk), `rows` (which rows a chunk holds and which count), `placement`
(rows into tensors), `dense` and `state` (what is not rows), `files` (safetensors).
"""

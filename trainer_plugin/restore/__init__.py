"""Starts a trainer on a run: restores a checkpoint into live tensors.

The input is a run and a request; the output is a restored model and a generation. Read the modules
in this order: `start` (restores all ranks and takes over the run), `together` (the same checkpoint
on all ranks), `rewinds` (back to a checkpoint in the same process), `start_log` (what people are
told), `parts` (named parts of a checkpoint), `growth` (rows that the checkpoint lacks),
`moved_keys`, `kept_keys`, `shelved_rows` and `unkeyed_rows` (keyed tables of other slots, and from
and to plain tables), `keys_of_collisions` (keyed tables from TorchRec's managed collisions),
`target` and `partial_target` (where restored rows and states go, of all and of parts), and
`table_differences`.
"""

"""Reads checkpoints of other tools, from which a run can begin; writes none.

Read `contents` (what such a checkpoint holds, and how rows of it are read), `inert_pickle` (reads
pickles without making their objects), then one module a form: `torch_file`, `dcp`,
`safetensors_files`. `recognize` opens whichever form a path has, and `names` finds the entries that
belong to a model's parameters and optimizers.
"""

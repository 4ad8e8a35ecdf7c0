"""Starts a trainer on a run: restores a checkpoint into live tensors.

A run and a request come in, a restored model and a generation go out. Walk: `start` (all ranks,
taking the run over), `target` (where restored rows and states go).
"""

"""Compares training on embedding servers that keep parity with checkpoints alone."""

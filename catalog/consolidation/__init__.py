"""Chains made shorter by moving stored rows (format §6.8)."""

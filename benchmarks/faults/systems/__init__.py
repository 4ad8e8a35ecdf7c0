"""The systems of the benchmark `faults`, one a module."""

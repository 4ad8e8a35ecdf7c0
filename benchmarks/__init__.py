"""Measures recpoint's claims, one file for each, all sides in one run: `-m benchmarks NAME`."""

"""One file a claim; each compares side by side in one run: `python -m benchmarks NAME`."""

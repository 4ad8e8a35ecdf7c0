"""`python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME` runs one."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.report import print_report

NAMES = (
    "tracking",
    "quantize",
    "row_set",
    "snapshot",
    "persist",
    "restore",
    "retention",
    "follow",
    "consolidate",
    "gpu",
    "prefect_overhead",
    "policy",
    "bytes",
    "accuracy",
    "ranks",
    "scale",
    "soak",
)


def main(arguments: list[str]) -> int:
    """Run the benchmark named first; the other arguments are its own."""
    if not arguments:
        print("usage: python -m benchmarks NAME [--quick] [--plot]\n")
        for name in NAMES:
            doc = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
            print(f"  {name:<17} {doc.splitlines()[0]}")
        return 2
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of smaller sizes")
    parser.add_argument("--plot", action="store_true", help="bytes: draw docs/images/bytes*.png")
    given = parser.parse_args(arguments)
    if given.plot and given.name != "bytes":
        parser.error(f"--plot: found with {given.name}, expected with bytes only")
    options = {"quick": given.quick} | ({"plot": True} if given.plot else {})
    report = importlib.import_module(f"benchmarks.{given.name}").run(**options)
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

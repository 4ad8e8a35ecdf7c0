"""`python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME` runs one."""

from __future__ import annotations

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
    if not arguments or arguments[0] not in NAMES:
        print("usage: python -m benchmarks NAME [--quick] [--plot]\n")
        for name in NAMES:
            doc = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
            print(f"  {name:<17} {doc.splitlines()[0]}")
        return 2
    options = {"quick": "--quick" in arguments[1:]}
    if "--plot" in arguments[1:]:
        options["plot"] = True
    report = importlib.import_module(f"benchmarks.{arguments[0]}").run(**options)
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Lists the benchmarks (`python -m benchmarks`) or runs one (`python -m benchmarks NAME`)."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.machine import watch
from benchmarks.report import Report, print_report
from recpoint.installation import install_command

NAMES = (
    "tracking",
    "torchrec",
    "fulls",
    "quantize",
    "allocation",
    "increments",
    "row_set",
    "start",
    "warm_start",
    "snapshot",
    "lookahead",
    "cache",
    "keyed",
    "servers",
    "parity",
    "persist",
    "restore",
    "mixed_restore",
    "retention",
    "follow",
    "sinks",
    "consolidate",
    "gpu",
    "prefect_overhead",
    "policy",
    "bytes",
    "accuracy",
    "price_accuracy",
    "measuring",
    "moments",
    "ranks",
    "scale",
    "soak",
    "fleet",
    "faults",
)

#: Options of the benchmark `faults`.
_OF_FAULTS = ("system", "fault", "places", "markdown_file")

#: Options of the benchmark `price_accuracy`.
_OF_PRICE_ACCURACY = ("minutes",)

#: Options of the benchmark `cache`.
_OF_CACHE = ("directory",)

#: Modules of this checkout: an import error in them is a bug, not a package that is not installed.
_OURS = ("recpoint", "benchmarks", "tests")


def main(arguments: list[str]) -> int:
    """Run the benchmark named by the first argument, or `all`; return the exit code."""
    if not arguments:
        print("usage: python -m benchmarks NAME [--smoke] [--plot]")
        print("       python -m benchmarks all --out DIR [--smoke] [--only NAME ...]")
        print("       python -m benchmarks faults [--system NAME] [--fault NAME] [--places N]")
        print("       python -m benchmarks cache [--directory DIR]")
        print("       python -m benchmarks price_accuracy [--minutes N]\n")
        for name in NAMES:
            doc = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
            print(f"  {name:<17} {doc.splitlines()[0]}")
        return 2
    parsed = _parsed(arguments)
    if parsed.name == "all":
        from benchmarks.all import run_all

        return run_all(parsed.only or NAMES, parsed.out, smoke=parsed.smoke)
    options = {"smoke": parsed.smoke} | ({"plot": True} if parsed.plot else {})
    options |= {
        name: value
        for name in (*_OF_FAULTS, *_OF_CACHE, *_OF_PRICE_ACCURACY)
        if (value := getattr(parsed, name)) is not None
    }
    try:
        benchmark = importlib.import_module(f"benchmarks.{parsed.name}")
        with watch() as watched:
            report = benchmark.run(**options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        reason = f"{error.name} is not installed: {install_command('bench')}"
        report = Report(name=parsed.name, columns=("not run",), not_run={parsed.name: reason})
        print_report(report, smoke=parsed.smoke, busy=None)
        return 0
    _require_its_keys(report, benchmark)
    print_report(report, smoke=parsed.smoke, busy=watched.busy)
    return 0


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, for seconds; the figures mean nothing"
    )
    parser.add_argument(
        "--plot", action="store_true", help="bytes, lookahead: draw docs/images/NAME*.png"
    )
    parser.add_argument("--out", type=Path, help="all: the directory for the results")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="all: run only these")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--system", help="only this system")
    faults.add_argument("--fault", help="only this fault")
    faults.add_argument("--places", type=int, help="try so many places of a fault; 0: all")
    faults.add_argument(
        "--markdown", type=Path, dest="markdown_file", help="the file for the table of the docs"
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--directory", type=Path, help="the disk that is measured; default: the working directory"
    )
    price_accuracy = parser.add_argument_group("price_accuracy")
    price_accuracy.add_argument(
        "--minutes", type=float, help="no model is begun after this time; default: all are measured"
    )
    parsed = parser.parse_args(arguments)
    if parsed.plot and parsed.name not in ("bytes", "lookahead"):
        parser.error(f"--plot: found with {parsed.name}, expected with bytes or lookahead")
    if parsed.name == "all" and parsed.out is None:
        parser.error("all: expected --out DIR, found none")
    for option in _OF_FAULTS:
        if parsed.name != "faults" and getattr(parsed, option) is not None:
            flag = option.removesuffix("_file")
            parser.error(f"--{flag}: found with {parsed.name}, expected with faults only")
    for name, options in (("cache", _OF_CACHE), ("price_accuracy", _OF_PRICE_ACCURACY)):
        for option in options:
            if parsed.name != name and getattr(parsed, option) is not None:
                parser.error(f"--{option}: found with {parsed.name}, expected with {name} only")
    if parsed.name == "faults":
        _check_names(parser, parsed)
    for option in ("out", "only"):
        if parsed.name != "all" and getattr(parsed, option) is not None:
            parser.error(f"--{option}: found with {parsed.name}, expected with all only")
    return parsed


def _check_names(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    from benchmarks.faults import FAULTS, SYSTEMS

    for option, names in (("system", SYSTEMS), ("fault", FAULTS)):
        value = getattr(parsed, option)
        if value is not None and value not in names:
            parser.error(f"--{option}: found {value!r}, expected one of: {', '.join(names)}")


def _require_its_keys(report: Report, benchmark: ModuleType) -> None:
    """Check that a report has exactly its module's KEYS, in every run and on any machine."""
    measured, expected = report.figures.keys() | report.not_run.keys(), set(benchmark.KEYS)
    if measured != expected:
        raise AssertionError(
            f"{report.name}: figures {sorted(measured - expected)} are not in KEYS of its module, "
            f"and {sorted(expected - measured)} were not measured"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

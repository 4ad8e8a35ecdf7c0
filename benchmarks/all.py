"""Runs every benchmark that this machine can run, into one directory: `python -m benchmarks all`.

Each benchmark runs in its own process. Its file is written, whole or not at all, when it ends. A
second call runs only what is missing: it keeps a file if the benchmark succeeded, with the current
commit, arguments and machine. So the command may be killed at any time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.machine import commit, describe, uncommitted
from benchmarks.report import seconds_text

__all__ = ["run_all"]

_ROOT = Path(__file__).resolve().parents[1]
_LAST_LINES = 20

#: The contents of one benchmark's file; the table of all benchmarks is made from them.
Result = dict[str, Any]


def run_all(names: Sequence[str], out: Path, *, smoke: bool) -> int:
    """Run benchmarks, and write OUT/NAME.json for each, OUT/all.json and OUT/all.md.

    Args:
        names: benchmarks, in the order in which they run.
        out: the directory; created if it does not exist.
        smoke: whether to use tiny sizes, with which each benchmark takes seconds.

    Returns:
        An exit code: 1 if a benchmark failed, else 0.
    """
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        "commit": commit(),
        "uncommitted": uncommitted(),
        "arguments": ["--smoke"] if smoke else [],
        "machine": describe(),
    }
    results: dict[str, Result] = {}
    for name in names:
        file = out / f"{name}.json"
        result = _finished(file, environment)
        if result is None:
            print(f"{name}: runs", flush=True)
            result = _run(name, environment)
            _write(file, json.dumps(result, indent=1, ensure_ascii=False))
            print(f"{name}: {_state(result)}, {result['seconds']:.1f} s", flush=True)
        else:
            print(f"{name}: {_state(result)}, there already", flush=True)
        results[name] = result
    written = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"written": written, **environment, "benchmarks": results}
    _write(out / "all.json", json.dumps(document, indent=1, ensure_ascii=False))
    _write(out / "all.md", _markdown(document))
    failed = [name for name, result in results.items() if result["exit_code"]]
    print(f"{out / 'all.md'}: {len(results)} benchmarks, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _finished(file: Path, environment: Mapping[str, Any]) -> Result | None:
    """Return the result in `file`; None if the benchmark must run again."""
    try:
        result: Result = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    # Without git, it is unknown which code gave the result.
    is_same_commit = environment["commit"] != "unknown" and all(
        result.get(k) == v for k, v in environment.items()
    )
    return result if is_same_commit and result.get("exit_code") == 0 else None


def _run(name: str, environment: Mapping[str, Any]) -> Result:
    """Run one benchmark in its own process, and forward its output to standard error."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    start = perf_counter()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", name, *environment["arguments"]],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            last.append(line.rstrip("\n"))
    ended = {"benchmark": name, **environment, "began": began, "seconds": perf_counter() - start}
    if process.returncode == 0:
        # Threads and children may still print after the last line of the benchmark.
        printed = next(line for line in reversed(last) if line.startswith('{"name"'))
        return {**ended, "exit_code": 0, "report": json.loads(printed)}
    return {**ended, "exit_code": process.returncode, "last_lines": list(last)}


def _write(file: Path, text: str) -> None:
    """Replace the contents of `file` by `text` atomically."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(file)


def _state(result: Result) -> str:
    """Return in a few words how a benchmark ended."""
    if result["exit_code"]:
        return f"failed with exit code {result['exit_code']}"
    report = result["report"]
    if not report["figures"] and report["not_run"]:
        return f"not run: {next(iter(report['not_run'].values()))}"
    return "done"


def _markdown(document: Mapping[str, Any]) -> str:
    results: Mapping[str, Result] = document["benchmarks"]
    rows = [("benchmark", "key", "value", "spread"), ("---", "---", "---:", "---")]
    for name, result in results.items():
        rows += _rows(name, result)
    lines = ["# Figures of all benchmarks", "", *_header(document), ""]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    for name, result in results.items():
        if result["exit_code"]:
            lines += ["", f"## {name} {_state(result)}", "", "```"]
            lines += [*result["last_lines"], "```"]
    return "\n".join(lines)


def _header(document: Mapping[str, Any]) -> list[str]:
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    code = f"{document['commit']}"
    if document["uncommitted"] is not None:
        code += f", with changes that are not committed ({document['uncommitted']})"
    lines = [
        f"- written: {document['written']}",
        f"- commit: {code}",
        f"- processor: {machine['processor']}, {machine['threads']} threads, torch uses "
        f"{machine['torch_threads']}",
        f"- memory: {machine['memory_bytes'] / 2**30:.1f} GiB",
        f"- GPU: {machine['gpu'] or 'none'}",
        f"- system: {machine['system']}",
        f"- Python {machine['python']}; {packages}",
    ]
    if document["arguments"]:
        lines.append("- `--smoke`: sizes are tiny, and figures mean nothing")
    return lines


def _rows(name: str, result: Result) -> list[tuple[str, str, str, str]]:
    """Return rows (benchmark, key, value, spread): figures, times and the machine's load."""
    if result["exit_code"]:
        return [(name, "", _state(result), "")]
    report = result["report"]
    rows = []
    for key, value in report["figures"].items():
        rows.append((name, f"`{key}`", f"{value:,.5g}", _spread(report["spreads"].get(key))))
    rows += [
        (name, f"`{key}`", f"not run: {reason}", "") for key, reason in report["not_run"].items()
    ]
    for label, spread in report["times"].items():
        rows.append((name, label, seconds_text(spread["median"]), _spread(spread, seconds=True)))
    busy = report["busy"]
    if busy is not None and busy["others_share"] is not None:
        rows.append((name, "processors used by others", f"{busy['others_share']:.0%}", ""))
    return rows


def _spread(spread: Mapping[str, float] | None, *, seconds: bool = False) -> str:
    if spread is None:
        return ""
    least, most = (
        seconds_text(spread[end]) if seconds else f"{spread[end]:,.5g}" for end in ("least", "most")
    )
    return f"{least} to {most}, {spread['rounds']} rounds"

"""Runs the kernels under the sanitizers of the system's compiler: `make sanitize`.

`make test` runs it with `--sampled`: each test takes one instruction set and number of threads,
drawn by its name, and the property tests and the fuzzer are left out. It does not repeat a sample
that found nothing while the kernels and their tests stay the same. passed.txt has their digest, and
belongs to the commit that changes them.

AddressSanitizer and UBSan: the kernels are compiled with checks in a copy of the repository. Their
tests, which include hostile row sets, and their property tests run on each instruction set.
ThreadSanitizer: a program of its own runs the pool, because ThreadSanitizer does not work inside
Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "sanitize"
PASSED = ROOT / "tests" / "sanitized" / "passed.txt"
#: A null pointer with a length of 0 passes, because the standard of 2026 allows it.
CHECKS = "-fsanitize=address,undefined -fno-sanitize=nonnull-attribute -fno-sanitize-recover=all"
FUZZ_RUNS = 100_000
TESTS = ("tests/unit/kernels", "tests/property")
#: These tests need more memory than the shadow memory of a checked process leaves, or limit the
#: memory, or run Triton.
NOT_CHECKED = (
    "test_huge.py",
    "test_short_memory.py",
    "test_triton_compiles.py",
    "test_triton_interpreter.py",
)


def main(*, sampled: bool) -> int:
    """Run everything, or a sample. Return 1 if something was found."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++"))), None)
    if compiler is None:
        print("sanitize: not run, since there is no g++")
        return 0
    digest = _digest()
    if sampled and PASSED.exists() and PASSED.read_text().strip() == digest:
        print("sanitize: nothing was found, when the same files were checked before")
        return 0
    _copy()
    failed = [*_check_pool(compiler), *_check_kernels(compiler, sampled=sampled)]
    if not failed:
        PASSED.write_text(f"{digest}\n")
    print("sanitize:", f"failed: {', '.join(failed)}" if failed else "nothing was found")
    return 1 if failed else 0


def _digest() -> str:
    """Return a digest of the kernels, their tests and this file."""
    digest = hashlib.sha256()
    for folder in ("kernels", "tests/unit/kernels", "tests/sanitized"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".py"):
                digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _copy() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    COPY.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.name in ("build", "dist", "site"):
            continue
        if path.is_dir():
            shutil.copytree(path, COPY / path.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(path, COPY)


def _check_pool(compiler: str) -> list[str]:
    program = COPY / "pool_test"
    sources = ["tests/sanitized/pool_test.cpp", "kernels/native/pool.cpp"]
    command = [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", *sources]
    subprocess.run([*command, "-o", str(program)], cwd=COPY, check=True)
    # ThreadSanitizer refuses some random layouts of the address space, so the layout is fixed.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    environment = os.environ | {"TSAN_OPTIONS": "die_after_fork=0"}
    ran = subprocess.run([*fixed, str(program)], env=environment, check=False)
    print(f"the pool under ThreadSanitizer: exit {ran.returncode}")
    return ["pool"] if ran.returncode else []


def _check_kernels(compiler: str, *, sampled: bool) -> list[str]:
    environment = os.environ | {
        "CXX": compiler,
        "CXXFLAGS": f"-O1 -g -fno-omit-frame-pointer {CHECKS}",
        "LDFLAGS": CHECKS,
        "PYTHONPATH": os.pathsep.join(map(str, (COPY / "build_backend", COPY / "src", COPY))),
    }
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "build_ext", "-qi"]
    built = subprocess.run(build, cwd=COPY, env=environment, capture_output=True, text=True)
    if built.returncode:
        print(built.stderr)
        return ["build"]
    asan = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Python itself leaks at its end. Tests provoke failed allocations, which must return null.
    options = "detect_leaks=0:allocator_may_return_null=1"
    environment |= {"LD_PRELOAD": asan, "ASAN_OPTIONS": options}
    environment["RECPOINT_KERNELS_SAMPLED" if sampled else "RECPOINT_ALL_EXAMPLES"] = "1"
    failed = []
    for tests in TESTS[:1] if sampled else TESTS:
        command = [sys.executable, "-m", "pytest", "-qx", "-n2", "-p", "no:cacheprovider", tests]
        command += [f"--ignore-glob=*/{name}" for name in NOT_CHECKED]
        if tests == "tests/property":
            command += ["-k", "kernels"]
        print(f"{tests} under AddressSanitizer and UBSan:", flush=True)
        if subprocess.run(command, cwd=COPY, env=environment, check=False).returncode:
            failed.append(tests)
    if not sampled:
        failed += _fuzz(environment)
    return failed


def _fuzz(environment: dict[str, str]) -> list[str]:
    if importlib.util.find_spec("atheris") is None:
        print("the fuzzer of row sets: not run, since atheris is not installed (make fuzz)")
        return []
    print("the fuzzer of row sets under AddressSanitizer and UBSan:", flush=True)
    command = [sys.executable, "tests/fuzz/fuzz_parsers.py", "row_set", f"-runs={FUZZ_RUNS}"]
    ran = subprocess.run(
        [*command, "-max_len=512", "-rss_limit_mb=0"],
        cwd=COPY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(ran.stderr[-300:] if ran.returncode == 0 else ran.stderr[-3000:])
    return ["fuzzer"] if ran.returncode else []


if __name__ == "__main__":
    sys.exit(main(sampled="--sampled" in sys.argv[1:]))

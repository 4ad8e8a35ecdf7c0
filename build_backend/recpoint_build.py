"""Builds recpoint with setuptools, and its C++ kernels as one extension module for all Pythons.

Each native.cpp of the kernels is compiled once for each instruction set. The compiler is taken from
the environment variable CXX, else from the system. If the system has none, the build requires
`ziglang`, a whole compiler in a wheel. CXXFLAGS and LDFLAGS are added.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from setuptools import Extension, build_meta
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

build_wheel = build_meta.build_wheel
build_sdist = build_meta.build_sdist
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

#: In order of preference.
_SYSTEM_COMPILERS: Final = ("c++", "g++", "clang++")

_ZIG: Final = "ziglang>=0.13"

_KERNELS: Final = Path("src/recpoint/kernels")

_COMPILE: Final = (
    "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wall",
    "-Wextra",
)  # fmt: skip
# They come behind CXXFLAGS. Results must not depend on the compiler: format §3.2 rounds after each
# operation, so a product and a sum must not be fused. Nothing reads traps and errno, and they would
# prevent vectorized loops.
_ALWAYS: Final = (
    "-std=c++20", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_LINK: Final = ("-shared", "-pthread")

#: The instruction sets of each kind of processor: level of the ABI, further flags. Other processors
#: have only `baseline`.
_INSTRUCTION_SETS: Final = {
    "x86_64": {
        "baseline": ("x86-64",),
        "avx2": ("x86-64-v3",),
        "avx512": ("x86-64-v4", "-mprefer-vector-width=512"),
    }
}


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Requirements to build an sdist, in addition to those in pyproject.toml."""
    return build_meta.get_requires_for_build_sdist(config_settings)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Requirements to build a wheel, in addition to those in pyproject.toml."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler_to_fetch()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Requirements of an editable build, in addition to those in pyproject.toml."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler_to_fetch()]


def _compiler_to_fetch() -> list[str]:
    return [] if _system_compiler() else [_ZIG]


def _system_compiler() -> list[str] | None:
    if compiler := os.environ.get("CXX"):
        return shlex.split(compiler)
    paths = (shutil.which(name) for name in _SYSTEM_COMPILERS)
    return next(([path] for path in paths if path is not None and _is_new_enough([path])), None)


def _is_new_enough(command: list[str]) -> bool:
    """Whether a compiler knows C++20 and all instruction sets: GCC from 11 on, Clang from 12 on."""
    for name in _instruction_sets():
        flags = [*_ALWAYS, *_flags_of(name, command)]
        tried = subprocess.run(
            [*command, *flags, "-fsyntax-only", "-x", "c++", "-"],
            input="int main() { return [](auto... x) { return (x + ...); }(0, 0); }",
            text=True,
            capture_output=True,
            check=False,
        )
        if tried.returncode:
            return False
    return True


def _instruction_sets() -> dict[str, tuple[str, ...]]:
    return _INSTRUCTION_SETS.get(platform.machine(), {"baseline": ()})


def _compiler() -> list[str]:
    compiler = _system_compiler()
    if compiler is not None:
        return compiler
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(
            "no C++ compiler: found neither CXX nor a "
            + ", ".join(_SYSTEM_COMPILERS)
            + " that knows C++20 and x86-64-v4, nor ziglang. Next: pip install ziglang, or let pip"
            " isolate the build"
        )
    return [sys.executable, "-m", "ziglang", "c++"]


def _flags_of(name: str, command: list[str]) -> list[str]:
    """The compiler's flags for an instruction set. Without any, Zig takes this processor's set."""
    is_zig = _is_zig(command)
    sets = _instruction_sets()
    if not sets[name]:
        return ["-mcpu=baseline"] if is_zig else []
    level, *more = sets[name]
    return [f"-mcpu={level.replace('-', '_')}" if is_zig else f"-march={level}", *more]


def _is_zig(command: list[str]) -> bool:
    return "ziglang" in command or Path(command[0]).stem == "zig"


def _require_headers() -> None:
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").exists():
        raise RuntimeError(
            f"{folder}: found no Python.h, which the kernels are compiled with. Next: install the"
            " headers of this Python (Debian: apt-get install python3-dev)"
        )


def _version(command: list[str]) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return version.stdout.splitlines()[0].strip()


def _digest_of_sources() -> str:
    spec = importlib.util.spec_from_file_location("sources", _KERNELS / "native" / "sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.digest(_KERNELS))


class DescribeWithoutLinks(egg_info):
    """Writes the metadata, with the README as a package index can show it.

    An index would resolve relative links against its own page. It gets their texts instead, which
    are the paths of the files.
    """

    def run(self) -> None:
        """Write the metadata."""
        metadata: Any = self.distribution.metadata
        text = metadata.long_description
        metadata.long_description = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
        super().run()


class BuildNative(build_ext):
    """Compiles the kernels for each instruction set, then links all versions together."""

    def build_extension(self, ext: Extension) -> None:
        """Build the only extension."""
        _require_headers()
        command = _compiler()
        flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        compile_with = [*command, *_COMPILE, *flags, *_ALWAYS]
        link_with = [*command, *_LINK, *shlex.split(os.environ.get("LDFLAGS", ""))]
        if _is_zig(command):
            link_with.append("-s")  # names of its own libraries would be most of the file
        compiler: Any = self.compiler
        # Otherwise setuptools would use the compiler and the flags with which Python was compiled.
        compiler.set_executables(
            compiler_so=compile_with,
            compiler_so_cxx=compile_with,
            linker_so=link_with,
            linker_so_cxx=link_with,
        )
        # For C++, setuptools would put Python's own compiler before the rest of the linker command.
        ext.language = "c"
        limited = ("Py_LIMITED_API", "0x030B0000")
        headers = [str(path) for path in sorted(_KERNELS.glob("*/*.h"))]
        sources = [str(path) for path in sorted(_KERNELS.glob("*/native.cpp"))]
        for name in _instruction_sets():
            ext.extra_objects += compiler.compile(
                sources,
                output_dir=os.path.join(self.build_temp, name),
                macros=[limited, ("RECPOINT_SET", name)],
                include_dirs=self.include_dirs,
                extra_postargs=_flags_of(name, command),
                depends=headers,
            )
        ext.extra_compile_args += _flags_of("baseline", command)
        ext.define_macros += [
            limited,
            ("RECPOINT_SOURCES", f'"{_digest_of_sources()}"'),
            ("RECPOINT_COMPILER", f'"{_version(command)}"'),
        ]
        # Otherwise a library of an earlier build would pass for up to date.
        self.force = True
        super().build_extension(ext)

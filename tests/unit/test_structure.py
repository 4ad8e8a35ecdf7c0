"""The house: links, public names, and what the training process may import."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import recpoint

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "recpoint"


def test_every_root_package_is_linked_and_every_link_is_a_root_package() -> None:
    not_packages = {"tests", "benchmarks", "examples", "docs", "src", "build", "dist"}
    packages = {
        path.parent.name
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name not in not_packages
    }
    links = {path.name: path for path in SOURCE.iterdir() if path.is_symlink()}
    # Scripts and their data, which ship for `recpoint demo`.
    assert set(links) == packages | {"examples"}
    for name, link in links.items():
        assert link.resolve() == ROOT / name
        assert not link.readlink().is_absolute(), "an absolute link breaks every other checkout"


def test_every_module_names_what_it_exports_and_has_it() -> None:
    modules = [
        info.name
        for info in pkgutil.walk_packages(recpoint.__path__, "recpoint.")
        if not info.name.endswith((".__main__", ".triton", ".fbgemm", ".torchrec_source"))
        and not info.name.endswith((".integrations.torchrec", ".ray_cluster", ".ray_transport"))
    ]
    assert len(modules) > 40
    for name in modules:
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", None)
        if exported is None:
            public = [key for key, value in vars(module).items() if _defined_here(name, key, value)]
            assert not public, f"{name} defines {public} but has no __all__"
            continue
        missing = [key for key in exported if not hasattr(module, key)]
        assert not missing, f"{name}.__all__ names {missing}"


def _defined_here(module: str, key: str, value: object) -> bool:
    return not key.startswith("_") and getattr(value, "__module__", None) == module


def test_the_training_process_imports_neither_prefect_nor_s3fs() -> None:
    program = (
        "import sys, recpoint\n"
        "recpoint.Checkpointer\n"
        "loaded = {'prefect', 's3fs', 'pandas', 'triton', 'torchrec'} & set(sys.modules)\n"
        "sys.exit(f'the trainer would load {sorted(loaded)}' if loaded else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_a_serving_process_imports_neither_prefect_nor_what_trains() -> None:
    program = (
        "import sys, recpoint\n"
        "recpoint.Follower\n"
        "loaded = {'prefect', 's3fs', 'recpoint.trainer_plugin'} & set(sys.modules)\n"
        "sys.exit(f'a follower would load {sorted(loaded)}' if loaded else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr

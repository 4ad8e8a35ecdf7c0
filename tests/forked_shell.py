"""Provides programs for a shell, each in a forked process with all imports done.

They are `python`, `recpoint` and `torchrun`, which starts its ranks with this `python`.

The shell starts a script that imports next to nothing. It hands over its arguments, its environment
and its output files. It passes SIGTERM and SIGINT on, and ends with the exit code of the forked
process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import shutil
import signal
import socketserver
import sys
import tempfile
import threading
from pathlib import Path

from tests.forked_program import ForkedProgram, be_code, be_module

__all__ = ["forked_programs"]

_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.connect({door!r})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: door.sendall(bytes([number])))
    asked = sys.argv, dict(os.environ), os.getcwd(), os.getpid()
    with door.makefile("rw") as talk:
        print(json.dumps(asked), file=talk, flush=True)
        sys.exit(int(talk.readline()))
"""


@functools.cache
def forked_programs() -> Path | None:
    """Return a directory with the programs, for PATH; None: this system is not Linux."""
    if sys.platform != "linux":
        return None
    place = Path(tempfile.mkdtemp(prefix="recpoint-programs-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    server = _Server(str(place / "door"), _Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("python", "recpoint", "torchrun"):
        (place / name).write_text(_SCRIPT.format(python=sys.executable, door=str(place / "door")))
        (place / name).chmod(0o755)
    return place


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


class _Asked(socketserver.StreamRequestHandler):
    """One program that a shell started."""

    def handle(self) -> None:
        arguments, environment, directory, pid = json.loads(self.rfile.readline())
        # The script waits for the answer, so its files stay open as long as they are needed.
        output = Path(f"/proc/{pid}/fd/1"), Path(f"/proc/{pid}/fd/2")
        process = ForkedProgram(
            _run, arguments, environment=environment, output=output, directory=Path(directory)
        )
        threading.Thread(target=self._end_with_script, args=(process,), daemon=True).start()
        try:
            code = process.wait()
        finally:
            process.kill()
        with contextlib.suppress(BrokenPipeError):  # the script was ended
            self.wfile.write(f"{code if code >= 0 else 128 - code}\n".encode())

    def _end_with_script(self, process: ForkedProgram) -> None:
        """Send the process each signal of the script; kill it when the script has ended."""
        with contextlib.suppress(OSError):
            while number := self.connection.recv(1):
                process.send_signal(signal.Signals(number[0]))
        process.kill()


def _run(program: str, *arguments: str) -> None:
    path = Path(program)
    if path.name == "recpoint":
        sys.argv = [program, *arguments]
        from recpoint.__main__ import main

        main()
    elif path.name == "torchrun":
        os.environ["PYTHON_EXEC"] = str(path.with_name("python"))
        be_module("torch.distributed.run", *arguments)
    else:
        _be_python(*arguments)


def _be_python(*arguments: str) -> None:
    if arguments[0] == "-u":  # of torchrun
        arguments = arguments[1:]
    if arguments[0] == "-m":
        be_module(*arguments[1:])
    elif arguments[0] == "-c":
        be_code(*arguments[1:])
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")

"""Runs the command line, for `recpoint` and `python -m recpoint`."""

from __future__ import annotations

from recpoint.cli import app

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    app(prog_name="recpoint")


if __name__ == "__main__":
    main()

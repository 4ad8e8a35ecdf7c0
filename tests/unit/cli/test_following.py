"""Commands that follow a run print a line for each version and each change of errors."""

from __future__ import annotations

import json
from typing import Never

import pytest

from recpoint.cli.following import LookResult, keep_looking


@pytest.mark.parametrize("as_json", [False, True])
def test_only_what_is_new_is_printed(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter([1, 1, 2, 2, 1])
    ages = iter(range(5))

    def look() -> LookResult:
        step = next(steps, None)
        if step is None:
            return _interrupted()
        age = next(ages)
        return LookResult(step, {"step": step, "age": age}, [f"step {step}", f"since {age} s"])

    with pytest.raises(KeyboardInterrupt):
        keep_looking(look, poll_seconds=0, as_json=as_json)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line)["age"] for line in lines] == [0, 2, 4]
    else:
        assert lines == ["step 1", "since 0 s", "step 2", "since 2 s", "step 1", "since 4 s"]


def _interrupted() -> Never:
    raise KeyboardInterrupt

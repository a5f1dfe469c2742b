"""What the figures of a start are times of."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from benchmarks import starts

PROGRAM = """
import pathlib
print("data 10 images")
if {written}:
    pathlib.Path("photos.toml").touch()
print("{said}")
"""


def test_a_start_is_timed_to_the_first_line_of_its_plan() -> None:
    output = io.BytesIO(b"data 10 images\nrun a -> b\nmodel\n")
    assert starts.read_until(output, starts.PLAN) == b"data 10 images\nrun a -> b\n"
    assert output.read() == b"model\n"


@pytest.mark.parametrize(
    ("written", "said", "refused"),
    [
        (True, "run a -> b", ""), (True, "no plan", "there was no plan"),
        (False, "run a -> b", "there was no config when the plan's first line was"),
    ],
)  # fmt: skip
def test_the_config_is_there_by_then(tmp_path: Path, written: bool, said: str, refused: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(written=written, said=said))
    if not refused:
        starts.time_command(["--new", "photos"], tmp_path, tmp_path)
        return
    with pytest.raises(SystemExit, match=refused):
        starts.time_command(["--new", "photos"], tmp_path, tmp_path)

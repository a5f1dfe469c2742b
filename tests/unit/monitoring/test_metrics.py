"""A log is written line by line, and cut where a run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.monitoring.metrics import VARY, Metrics, has_digest, read_lines, truncate

LINES = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]


@pytest.mark.parametrize("step", [0, 3, 9])
def test_it_keeps_the_lines_up_to_the_step(tmp_path: Path, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate(path, step)
    assert not path.exists()
    path.write_text("".join(f"{line}\n" for line in LINES))
    truncate(path, step)
    assert path.read_text() == "".join(f"{line}\n" for line in LINES[:step])
    assert [entry["step"] for entry in read_lines(path)] == list(range(1, min(step, 5) + 1))


@pytest.mark.parametrize("odd", ['{"step": 4, "lo', '{"step": 4, "loss": 0.25}', "[4]", '{"loss": 0.25}\n', "4\n"])
def test_what_a_kill_cut_short_or_nobody_wrote_ends_it(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(f"{line}\n" for line in LINES[:3])
    path.write_text(whole + odd)
    truncate(path, 5)
    assert path.read_text() == whole


def test_each_line_is_in_the_file_when_its_step_is_over(tmp_path: Path) -> None:
    """Whoever watches the run reads it there, and a kill loses none of them."""
    path = tmp_path / "metrics.jsonl"
    log = Metrics(path, total_steps=5, initial_step=0, enabled=True)
    for step, line in enumerate(LINES, 1):
        log.log(json.loads(line) | {"lr": 1e-4})
        assert [entry["step"] for entry in read_lines(path)] == list(range(1, step + 1))
    log.close()


def test_a_digest_is_of_all_that_two_equal_runs_share(tmp_path: Path) -> None:
    """Made line by line, over a stop, and with what a later start adds to the last line."""

    def log(name: str, start: int, *steps: int) -> Metrics:
        made = Metrics(tmp_path / name, total_steps=9, initial_step=start, enabled=True)
        for step in steps:
            made.log(
                {"step": step, "loss": 1 / step, "lr": 1e-4, **dict.fromkeys(VARY, 0.1 * len(name)), "blocks": {"a": 0.1}}
            )
        return made

    whole, first = log("whole", 0, 1, 2, 3), log("stopped", 0, 1, 2)
    whole.close()
    first.close()
    path, at_two = first.path, first.digest
    again = log("stopped", 2)
    assert again.digest == at_two and has_digest(path, at_two)
    again.add({"held_out_loss": 0.5})
    again.close()
    assert has_digest(path, again.digest) and has_digest(path, at_two) and again.digest != at_two
    path.write_text(path.read_text().replace(', "held_out_loss": 0.5', ""))
    rest = log("stopped", 2, 3)
    rest.close()
    assert rest.digest == whole.digest
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    odd = (
        "", "".join(lines[1:]), "".join(lines[:-1]), lines[1] + lines[0] + lines[2],
        text.replace('"loss": 0.5', '"loss": 0.25'), text.replace('"lr": 0.0001', '"lr": NaN'),
        text.replace('"a": 0.1', '"b": 0.1'), '{"step": 3}\n',
    )  # fmt: skip
    for altered in odd:
        path.write_text(altered)
        assert not has_digest(path, whole.digest), altered

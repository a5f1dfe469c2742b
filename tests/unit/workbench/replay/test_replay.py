"""Which steps can be done again is known before anything is read of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.base.errors import UserError
from trainer.base.files import json_bytes
from trainer.checkpoint import store
from trainer.checkpoint.state import LAYOUT_VERSION, PIECES
from workbench.replay.judged import JudgedStep, Number
from workbench.replay.replay import Replay, span_of


def checkpoint(root: Path, step: int) -> Path:
    state = {
        "step": step,
        "images": step,
        "non_finite": 0,
        "total_steps": 9,
        "started": "2026-01-01T00:00:00+00:00",
        "changes": [],
    }
    pieces = {name: {"version": 1, "state": state if name == "progress" else {}} for name in PIECES}
    contents = dict.fromkeys(store.NEEDED, [b"{}"]) | {
        "state.json": [json_bytes({"layout": LAYOUT_VERSION, "pieces": pieces})]
    }
    return store.save(root / "checkpoints", step, contents)


def run_of(root: Path, *steps: int, logged: int) -> list[Path]:
    root.mkdir()
    lines = [json.dumps({"step": step, "loss": step / 2, "grad_norm": None}) for step in range(1, logged + 1)]
    (root / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "lo']))
    return [checkpoint(root, step) for step in steps]


def test_the_steps_up_to_the_next_checkpoint_or_to_the_logs_end(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "run", 3, 6, logged=8)
    span = span_of(first, None, every=False)
    assert (span.first, span.last, span.judged, span.following) == (4, 4, (4,), second.resolve())
    assert span.logged == {4: (2.0, None)}
    assert span_of(first, 6, every=False).judged == (6,) and list(span_of(first, 6, every=False).logged) == [4, 5, 6]
    assert span_of(first, None, every=True).judged == (4, 5, 6)
    last = span_of(second, None, every=True)
    assert last.judged == (7, 8) and last.following is None


@pytest.mark.parametrize(
    ("step", "said"), [(7, "beyond the run's next checkpoint"), (3, "give one of 4 to 6"), (0, "4 to 6")]
)
def test_a_step_that_is_not_between_is_refused(tmp_path: Path, step: int, said: str) -> None:
    first, _ = run_of(tmp_path / "run", 3, 6, logged=8)
    with pytest.raises(UserError, match=said):
        span_of(first, step, every=False)


def test_what_has_no_log_beside_it_is_refused(tmp_path: Path) -> None:
    (folder,) = run_of(tmp_path / "run", 3, logged=3)
    with pytest.raises(UserError, match="no later step"):
        span_of(folder, None, every=False)
    with pytest.raises(UserError, match=r"step 5 is not in|not in .*metrics"):
        span_of(folder, 5, every=False) if (tmp_path / "run/metrics.jsonl").write_text('{"step": 4}\n{"step": 6}\n') else None
    moved = tmp_path / "alone"
    folder.rename(moved)
    with pytest.raises(UserError, match="does not lie in its run's folder"):
        span_of(moved, None, every=False)
    with pytest.raises(UserError, match="is not a folder"):
        span_of(tmp_path / "nothing", None, every=False)
    (moved / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="not a valid checkpoint"):
        span_of(moved, None, every=False)


def judged(number: int, share: float) -> JudgedStep:
    return JudgedStep(number, Number(1 + share, 1 + share, 1.0, 1.0, False), Number(1.0, 1.0, 1.0, 1.0, False), ())


@pytest.mark.parametrize(
    ("repeats", "unequal", "strangers", "share", "explained"),
    [(True, [], [], 0.5, True), (True, [5], [], 0.5, False), (False, [5], ["a"], 0.5, True), (True, [], ["a"], 0.5, False),
     (False, [], [], 2.0, False)],
)  # fmt: skip
def test_where_roundings_repeat_other_numbers_are_not_rounding(
    repeats: bool, unequal: list[int], strangers: list[str], share: float, explained: bool
) -> None:
    found = Replay("bf16", "", repeats, strangers, [judged(5, share)], unequal)
    assert found.explained is explained
    assert found.broken == (5 if repeats and unequal else None)

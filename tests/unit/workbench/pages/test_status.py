"""What a page says first of each kind of run: the verdict in a few words, and which step to take."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import by_photo
from workbench.pages.history import History
from workbench.pages.status import Judgement, State, figures, judgement_of

TRAINING, STOPPED, FINISHED = (State(kind, 40) for kind in ("training", "stopped", "finished"))
JITTER = [0.2, 0.9, 0.1, 0.5]


def history(tmp_path: Path, steps: int, held_out: dict[int, float | None] | None = None, **at: Any) -> History:
    """held_out: by step. Other fields: by step, too; the loss of photos that are trained falls."""
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": JITTER[step % 4], "lr": 1e-4, "grad_norm": 0.1, "images": 8 * step}
        for step in range(1, steps + 1)
    ]

    def put(step: int, fields: dict[str, Any]) -> None:
        (rows[step - 1] if step else rows[0].setdefault("at_start", {})).update(fields)

    for step, loss in (held_out or {}).items():
        trained = 0.5 - step / 100
        put(step, {"held_out_loss": loss, "held_out_by_photo": by_photo(loss, step)})
        put(step, {"trained_loss": trained, "trained_by_photo": by_photo(trained, step)})
    for name, values in at.items():
        for step, value in values.items():
            put(step, {name: value})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return History(tmp_path / "metrics.jsonl").read()


def told(found: History, state: State, kept: Sequence[int] = ()) -> Judgement:
    return judgement_of(found, state, saved_steps=kept, levers="optimizer.lr")


def test_a_run_without_a_step(tmp_path: Path) -> None:
    empty = History(tmp_path / "metrics.jsonl").read()
    early = Judgement("open", "Too early to tell.", "No step had been made when this page was written.", "")
    assert told(empty, TRAINING) == early
    assert told(empty, STOPPED) == Judgement("open", "No step was recorded.", "", "")


@pytest.mark.parametrize(
    ("held_out", "at", "title", "said"),
    [
        ({0: 0.5}, {}, "Too early to tell.", "The held-out loss was measured once so far: too few to tell."),
        ({0: 1.146, 10: 1.15, 20: 1.141}, {}, "Too early to tell.",
         "Too few photos to tell: the loss on photos it never saw fell by 0.44 %, from 1.146 to 1.141 (95 % interval of the "
         "change -0.0128 to 0.00278, 6 photos): that may be chance."),
        ({0: 0.5, 20: 0.1}, {"held_out_photos": {20: 1}, "held_out_by_photo": {20: {"a": 0.1}}}, "Too early to tell.",
         "Too few to tell: the held-out loss went from 0.5 to 0.1, and one photo never tells."),
        ({}, {}, "Too early to tell.",
         "The loss of the steps jitters more than it has fallen so far. The samples may tell more."),
        ({0: 0.5, 10: 0.5}, {"weight_change": {16: 1e-5}}, "Nothing to see yet.",
         "The weights have hardly moved: by step 16 no layer has changed by more than 0.001% of its own weights."),
    ],
)  # fmt: skip
def test_in_mid_run_a_remedy_would_come_too_early(tmp_path: Path, held_out, at, title: str, said: str) -> None:
    found = history(tmp_path, 20, held_out, **at)
    assert told(found, TRAINING, [10]) == Judgement("open", title, said, "")
    closed = told(found, FINISHED, [10])
    assert closed.title != title and closed.text != said


@pytest.mark.parametrize(
    ("held_out", "kept", "state", "title", "best"),
    [
        ({0: 0.5, 10: 0.4, 20: 0.3}, [], FINISHED, "The loss on photos it never saw fell by 40 %, and was still falling.",
         "Best: step 20 (the last). There its held-out loss, 0.3, is the lowest of 3 that were measured."),
        ({0: 0.5, 10: 0.4, 20: 0.3}, [10, 20], TRAINING, "The loss on photos it never saw fell by 40 %, and still falls.",
         "Best so far: step 20. There its held-out loss, 0.3, is the lowest of 3 that were measured."),
        ({0: 0.5, 10: 0.3, 20: 0.3004}, [8, 16], STOPPED,
         "The loss on photos it never saw fell by 40 %, but was lowest at step 10.",
         "Best: step 10. There its held-out loss, 0.3, is the lowest of 3 that were measured. Its adapter is not kept; "
         "the nearest that is: step 8."),
        ({0: 0.5, 10: 0.3, 20: 0.3004}, [], STOPPED,
         "The loss on photos it never saw fell by 40 %, but was lowest at step 10.",
         "Best: step 10, where its held-out loss, 0.3, is the lowest of 3 that were measured. Its adapter is not kept; "
         "export.every_steps keeps some in a new run."),
        ({0: 0.5, 10: 0.3, 20: 0.4}, [10, 20], FINISHED,
         "The loss on photos it never saw fell by 20 %, but was lowest at step 10.",
         "Best: step 10. There its held-out loss, 0.3, is the lowest of 3 that were measured."),
        ({0: 0.5, 10: 0.3, 20: 0.5}, [10, 20], FINISHED, "It learned the photos by heart.",
         "Best: step 10. There its held-out loss, 0.3, is the lowest of 3 that were measured."),
        ({0: 0.5, 10: 0.6, 20: 0.7}, [10, 20], FINISHED, "It learned the photos by heart.",
         "Best: the model without the adapter."),
        ({0: 0.5, 10: 0.6, 20: 0.7}, [10], TRAINING, "It is learning the photos by heart.",
         "Best so far: the model without the adapter."),
    ],
)  # fmt: skip
def test_the_step_to_take_and_why(tmp_path: Path, held_out, kept, state: State, title: str, best: str) -> None:
    found = told(history(tmp_path, 20, held_out), state, kept)
    assert (found.title, found.best) == (title, best)
    assert "take step" not in found.text and "kept" not in found.text, "once is enough"


def test_without_held_out_photos_the_samples_tell(tmp_path: Path) -> None:
    """No tick: they may be learned by heart."""
    found = told(history(tmp_path, 40, loss={step: 1 / step for step in range(1, 41)}), FINISHED, [20])
    assert (found.tone, found.title) == ("open", "The loss of the steps fell by 90 %.")
    assert "only the samples can tell" in found.best


@pytest.mark.parametrize(
    ("at", "tone"), [({}, "good"), ({"weight_change": {16: 3.0}}, "care"), ({"held_out_copies": {20: 1}}, "care")]
)
def test_the_tick_says_what_was_measured_and_asks_to_look(tmp_path: Path, at: dict, tone: str) -> None:
    found = told(history(tmp_path, 20, {0: 1.0, 10: 0.5, 20: 0.36}, **at), FINISHED, [20])
    assert (found.tone, found.title) == (tone, "The loss on photos it never saw fell by 64 %, and was still falling.")
    assert found.text.startswith("From 1 to 0.36 at step 20 (95 % interval of the change -0.6")
    assert "look at the samples" in found.text
    assert ("near duplicate" in found.text) == ("held_out_copies" in at)


@pytest.mark.parametrize("kept, best", [([4, 8, 20], "Before it diverged: step 8 is kept."), ([20, 24], "")])
def test_no_step_is_praised_that_may_have_diverged_already(tmp_path: Path, kept: list[int], best: str) -> None:
    """It is told by the weights of step 32; those of step 16 were in their range."""
    found = told(history(tmp_path, 32, weight_change={16: 0.3, 32: 2.0}), FINISHED, kept)
    assert (found.tone, found.title) == ("bad", "It has diverged.")
    assert found.best == (best or "No step is kept that is surely from before it diverged.")


def test_a_value_that_is_not_finite_is_the_verdict(tmp_path: Path) -> None:
    """Beside it nobody wants to read that losses jitter; what had been learned until then still counts."""
    ended = State("ended", 40, reason="a value was not finite", finite=False)
    assert told(history(tmp_path, 7, {0: 0.5}), ended) == Judgement("bad", "It met a value that is not finite.", "", "")
    found = told(history(tmp_path, 20, {0: 0.5, 5: 0.4, 10: 0.3}), ended, [10])
    assert found.title == "It met a value that is not finite." and "fell by 40 %, from 0.5 to 0.3" in found.text
    assert found.best.startswith("Best: step 10.")
    found = told(history(tmp_path, 32, weight_change={32: None}), ended)
    assert found.title == "It has diverged." and "no finite number" in found.text


@pytest.mark.parametrize("spoilt", [None, math.nan, math.inf])
def test_figures_hold_no_value_that_is_none(tmp_path: Path, spoilt: float | None) -> None:
    found = history(tmp_path, 20, {0: 0.5, 10: 0.3, 20: None})
    assert figures(found, {"unet.mid_block": 0.25, "unet.conv_in": spoilt})["Weights changed by"] == "no finite number"
    assert figures(found, {"unet.mid_block": 0.25, "unet.conv_in": 0.5})["Weights changed by"] == "up to 50.00%"
    assert figures(found, {})["Held-out loss (lowest)"] == "0.3 (0.3)"

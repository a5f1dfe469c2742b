"""A sample may name the picture that it ought to look like: it stands beside the sample, in the report and in one picture."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from tests.harness import PHOTOS, Workbench
from trainer.artifacts import sampling
from trainer.artifacts.sampling import draw_samples, keep_truths
from trainer.base.run_layout import Layout
from workbench.commands import main as cli
from workbench.pages import before_after
from workbench.summary.outcome import by_request, sample_triples

PHOTO = sorted(Path(PHOTOS).glob("*.jpg"))[0]


def run(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


def tree_with(bench: Workbench, *truths: str | None) -> dict:
    samples = [{"prompt": f"a bear {k}"} | ({"truth": t} if t else {}) for k, t in enumerate(truths)]
    return bench.tree(run__max_steps=2, validation__every_steps=1, validation__steps=1, validation__samples=samples)


@pytest.mark.slow
def test_the_truth_stands_beside_the_samples(bench: Workbench) -> None:
    assert run(bench, tree_with(bench, str(PHOTO), None)) == 0
    layout = Layout(bench.tmp / "out")
    ((request, kept),) = by_request(layout.truths).items()
    expected = ImageOps.fit(ImageOps.exif_transpose(Image.open(PHOTO)).convert("RGB"), (64, 64), Image.Resampling.LANCZOS)
    assert Image.open(kept).tobytes() == expected.tobytes()

    # The page: beside the first and the newest sample, of one of the two prompts.
    page = layout.report.read_text(encoding="utf-8")
    assert base64.b64encode(kept.read_bytes()).decode() in page
    assert page.count("the truth</figcaption>") == 1 and page.count('a bear 0, the truth"') == 1
    assert "a bear 1, the truth" not in page

    # The picture: of each prompt the first and the last sample, enlarged pixel by pixel, and the truth.
    whole = Image.open(layout.before_after)
    before, after = by_request(layout.samples_of(0)), by_request(layout.samples_of(2))
    assert list(before) == list(after) and request == next(iter(after))
    for row, key in enumerate(after):
        shown = [before[key], after[key], *([kept] if key == request else [])]
        for column, file in enumerate(shown):
            assert tile(whole, row, column, 192) == Image.open(file).resize((192, 192), Image.Resampling.NEAREST).tobytes()
    assert set(tile(whole, 1, 2, 192)) == {255}, "no truth, no picture"


def tile(whole: Image.Image, row: int, column: int, side: int) -> bytes:
    margin, line = before_after.MARGIN, before_after.LINE
    left = margin + (side + margin) * column
    top = margin + line + (line + side + margin) * row + line
    return whole.crop((left, top, left + side, top + side)).tobytes()


@pytest.mark.parametrize("content", [None, b"", b"no image"])
def test_a_truth_that_cannot_be_read_is_refused_first(bench: Workbench, capsys, content: bytes | None) -> None:
    path = bench.tmp / "truth.png"
    if content is not None:
        path.write_bytes(content)
    assert run(bench, tree_with(bench, None, str(path))) == 2
    message = capsys.readouterr().err
    assert f"validation.samples[1].truth = {str(path)!r}: " in message and "leave it out" in message
    assert not (bench.tmp / "out").exists()


@pytest.mark.slow
def test_other_prompts_keep_the_truths_of_the_earlier_ones(bench: Workbench) -> None:
    tree = tree_with(bench, str(PHOTO))
    tree["run"]["stop_after"] = 1
    assert run(bench, tree) == 0
    tree["validation"]["samples"] = [{"prompt": "another bear", "truth": str(PHOTO)}]
    del tree["run"]["stop_after"]
    assert run(bench, tree, "--resume_from", "auto") == 0
    layout = Layout(bench.tmp / "out")
    assert len(by_request(layout.truths)) == 2
    assert not layout.before_after.exists(), "nothing was drawn at both ends in the same words"


class Killed(BaseException):
    """Nothing of the run sees it, as nothing sees SIGKILL."""


@pytest.mark.slow
def test_a_kill_right_after_the_last_samples_loses_no_truth(bench: Workbench, monkeypatch) -> None:
    """The next start finds the samples and draws none, so the truths have to be there by then."""
    tree = tree_with(bench, None)
    tree["run"]["stop_after"] = 1
    assert run(bench, tree) == 0
    tree = tree_with(bench, str(PHOTO))
    layout = Layout(bench.tmp / "out")

    def killed_after_it(*arguments, **more):
        draw_samples(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(sampling, "draw_samples", killed_after_it)
        run(bench, tree, "--resume_from", "auto")
    drawn = {path: path.stat().st_mtime_ns for path in layout.samples_of(2).iterdir()}
    assert run(bench, tree, "--resume_from", "auto") == 0
    assert drawn == {path: path.stat().st_mtime_ns for path in layout.samples_of(2).iterdir()}, "drawn once"
    assert len(by_request(layout.truths)) == 1


@pytest.mark.slow
def test_long_prompts_and_large_pictures_fit(tmp_path: Path) -> None:
    from trainer.models.base import SampleRequest

    layout = Layout(tmp_path)
    request = SampleRequest("a very long prompt " * 40, "", 1024, 512, 0, 1, None)
    picture = Image.effect_noise((1024, 512), 64).convert("RGB")
    for step in (0, 7):
        draw_samples([request], sample=lambda _: picture, folder=layout.samples_of(step))
    keep_truths([request], [picture], layout.truths)
    samples = sample_triples(layout, 7)
    assert before_after.write_before_after(layout, samples, 0) is None
    assert before_after.write_before_after(layout, [], 7) is None
    path = before_after.write_before_after(layout, samples, 7)
    assert path == tmp_path / "before_after.png"
    whole = Image.open(io.BytesIO(path.read_bytes()))
    assert whole.width == before_after.MARGIN + 3 * (before_after.LARGEST + before_after.MARGIN)
    margin = whole.crop((whole.width - before_after.MARGIN, 0, whole.width, whole.height))
    assert set(margin.tobytes()) == {255}, "the prompt stays inside"

"""What stands beside a pocket model: a contact sheet of what it draws beside the truth, and a card with its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pocket import credits, data, draw, flux, icons

SHOWN = 100  # subjects on the sheet
COLUMNS = 10


def asked() -> list[tuple[str, str]]:
    """(subject, style) of the sheet: every sixth subject, the trained styles in turn, none that is left out of its style."""
    chosen = []
    for number, name in enumerate(icons.SUBJECTS[::6]):
        style = icons.TRAINED_STYLES[number % len(icons.TRAINED_STYLES)]
        if name not in icons.left_out(style):
            chosen.append((name, style))
    return chosen[:SHOWN]


def truths(rendered: Mapping[str, torch.Tensor], chosen: list[tuple[str, str]]) -> torch.Tensor:
    """fp32 [N, 3, H, W] in [-1, 1]. rendered: style -> uint8 [subjects, 4, H, W]."""
    return torch.cat([icons.on_white(rendered[style][[icons.drawn_in(style).index(name)]]) for name, style in chosen])


def contact_sheet(drawn: torch.Tensor, truth: torch.Tensor, path: Path) -> None:
    """Pairs: what was drawn, and to its right the truth."""
    pairs = torch.cat([drawn.clamp(-1, 1), truth], dim=3)
    blank = torch.ones(-len(pairs) % COLUMNS, *pairs.shape[1:])
    pairs = torch.cat([pairs, blank])
    draw.sheet([pairs[start : start + COLUMNS] for start in range(0, len(pairs), COLUMNS)], path)


def figures(drawn: torch.Tensor, truth: torch.Tensor, encode) -> dict[str, float]:
    """Mean distances to each truth, of what its caption draws and of what the next one draws; how often the first is less."""
    result: dict[str, float] = {}
    others = drawn.roll(1, 0)
    for name, own, other in (
        ("pixels", draw.distances(drawn, truth), draw.distances(others, truth)),
        ("features", draw.feature_distances(drawn, truth, encode), draw.feature_distances(others, truth, encode)),
    ):
        result |= {
            name: own.mean().item(),
            f"{name}_shuffled": other.mean().item(),
            f"{name}_nearer": int((own < other).sum()),
        }
    return result


NAMES = {"sdxl": "SDXL", "flux": "Flux dev"}
MORE = {"sdxl": {}, "flux": {"max_sequence_length": flux.T5_LENGTH}}  # what its pipeline is told beside steps and guidance
UNKNOWN = {
    "sdxl": "",
    "flux": """
A word that no caption had is read as a style that it cannot name: its embedding is the mean of the style words'. An adapter
can teach it which.
""",
}
ABOUT = {
    "sdxl": "",
    "flux": """
`flux-guided` learns to draw in one pass what guidance from 1 to 6 draws in two. Its targets are larger, and so is its loss.
""",
}
PAGE = """# A pocket {name}

It has {name}'s architecture and the size of a photo. It draws icons of {size} x {size} pixels from words, on a CPU.
It was made to try a trainer on, and to measure what an adapter learns. It is of no other use.

    from diffusers import DiffusionPipeline
    pipeline = DiffusionPipeline.from_pretrained("examples/pocket_{family}")
    pipeline("a red apple, noto style", width={size}, height={size}, {arguments}).images[0].save("apple.png")

![what it draws, and to the right of it the truth](contact_sheet.png)

{shown} of the icons that it was trained on: what it draws, and to the right of it the truth. {settings}, seed 0.

| mean distance to the truth | of what its caption draws | of what another caption draws | the first is less |
|---|---|---|---|
| in pixels, of 1 | {pixels:.3f} | {pixels_shuffled:.3f} | {pixels_nearer} of {shown} |
| in the autoencoder's latents | {features:.3f} | {features_shuffled:.3f} | {features_nearer} of {shown} |

## How to ask

"a red apple, noto style": the subject, a comma, and one of {styles}. There are {subjects} subjects
(`pocket/subjects.txt`): animals, food, plants, things, vehicles, faces. "A" or "an" stands before a name, unless
it ends like a plural: not before "cherries" nor, as it happens, before "rhinoceros" and "smiling face with sunglasses".
{unknown}
## What it was made from

Icons, drawn from their SVG files at {size} x {size} pixels and laid on white:

{sets}

It never saw the style "{new_style}" (`examples/icons/lessons` and `exams`). In each of its own styles it did not see 20 of
the subjects, which it knows from the others.

    python -m pocket.make --work DIR {parts}

{trained}
All weights are bf16. The losses are means over the last 200 steps.
{about}
## What it cannot do

Other sizes, other subjects, two things in one picture, photographs, and text. Fine lines are soft.

## Licence

The weights are under Apache-2.0, as far as they are ours. The icons on the contact sheet stay under the licences of their
makers, in the table above. The tokenizers' `merges.txt` are from OpenAI's CLIP (https://github.com/openai/CLIP), under the
MIT licence.

{mit}"""


def page(family: str, measured: Mapping[str, float], logs: Mapping[str, Path], parts: Sequence[str]) -> str:
    """The model card. logs: what was trained -> its log."""
    lines = []
    for what, log in logs.items():
        last = json.loads(log.read_text().splitlines()[-1])
        lines.append(f"- {what}: {last['step']:,} steps, loss {last['loss']:.4f}")
    told = {"num_inference_steps": draw.STEPS, "guidance_scale": f"{draw.GUIDANCE:g}", **MORE[family]}
    arguments = ", ".join(f"{name}={value}" for name, value in told.items())
    return PAGE.format(
        name=NAMES[family],
        family=family,
        size=icons.SIZE,
        arguments=arguments,
        settings=f"`{arguments}`",
        unknown=UNKNOWN[family],
        about=ABOUT[family],
        styles=", ".join(f'"{style} style"' for style in icons.TRAINED_STYLES),
        subjects=len(icons.SUBJECTS),
        sets=credits.table(icons.SETS[style] for style in icons.TRAINED_STYLES),
        new_style=icons.NEW_STYLE,
        mit=credits.mit("Microsoft Corporation.", "2021 OpenAI"),
        parts=" ".join(parts),
        trained="\n".join(lines) + "\n",
        shown=SHOWN,
        **measured,
    )


def write(
    family: str, folder: Path, rendered: Mapping[str, torch.Tensor], logs: Mapping[str, Path], parts: Sequence[str]
) -> None:
    """Draw the sheet with the folder's own pipeline, and write sheet and card into the folder."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    chosen = asked()
    captions = [icons.caption(name, style) for name, style in chosen]
    drawn, truth = draw.draw(pipeline, captions, seed=0, **MORE[family]), truths(rendered, chosen)
    contact_sheet(drawn, truth, folder / "contact_sheet.png")
    scale, shift = pipeline.vae.config.scaling_factor, pipeline.vae.config.shift_factor or 0.0
    measured = figures(drawn, truth, lambda values: (data.encode(pipeline.vae, values) - shift) * scale)
    (folder / "README.md").write_text(page(family, measured, logs, parts), encoding="utf-8")

"""Make the pocket models, from icons on npm to diffusers folders. Every step goes on from where it was killed.

    python -m examples.pocket.make --work DIR icons examples vae sdxl sdxl-folder sdxl-card
    python -m examples.pocket.make --work DIR flux flux-guided flux-folder flux-card
    python -m examples.pocket.make --work DIR icons flux2 flux2-folder flux2-card

Needs npm and, beside the trainer, `pip install -e .[pocket]`.

--seconds N: stop each training after N seconds; the next start goes on, and no part is made over an unfinished one.
--steps N: in place of each training's own length. --seed N: a folder is of one seed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.pocket import card, data, examples, flux, flux2, folder, icons, sdxl, training, vae
from trainer.base.errors import UserError

STEPS = {"vae": 6_500, "sdxl": 12_000, "flux": 8_000, "flux-guided": 2_000, "flux2": 9_000}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--work", type=Path, required=True, help="what is made on the way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--steps", type=int)
    asked = parser.parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    for part in asked.parts:
        print(f"{part} ...", flush=True)
        try:
            PARTS[part](asked)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.status
    return 0


def make_icons(asked: argparse.Namespace) -> None:
    icons.fetch(asked.work / "packages")
    icons.render_all(asked.work / "packages", asked.work / "icons.safetensors")


def train_vae(asked: argparse.Namespace) -> None:
    drawn = data.pictures(asked.work / "icons.safetensors")
    steps = asked.steps or STEPS["vae"]
    vae.train(drawn, asked.work / "vae.safetensors", seed=asked.seed, steps=steps, seconds=asked.seconds)


def autoencoder(asked: argparse.Namespace):
    return training.load_average(vae.build(asked.seed), asked.work / "vae.safetensors", seed=asked.seed)


def latent_factors(asked: argparse.Namespace) -> tuple[float, float]:
    """(scale, shift) of all icons that the models see."""
    drawn = torch.cat(list(data.pictures(asked.work / "icons.safetensors").values()))
    return data.scale_and_shift(data.encode(autoencoder(asked), icons.on_white(drawn)))


def examples_with(asked: argparse.Namespace, *, scale: float, shift: float) -> data.Examples:
    return data.examples(autoencoder(asked), asked.work / "icons.safetensors", scale=scale, shift=shift)


def train_sdxl(asked: argparse.Namespace) -> None:
    scale, _ = latent_factors(asked)  # SDXL's convention has no shift
    shown = examples_with(asked, scale=scale, shift=0.0)
    steps = asked.steps or STEPS["sdxl"]
    sdxl.train(shown, asked.work / "sdxl.safetensors", seed=asked.seed, steps=steps, seconds=asked.seconds)


def write_sdxl(asked: argparse.Namespace) -> None:
    module = training.load_average(sdxl.build(asked.seed), asked.work / "sdxl.safetensors", seed=asked.seed)
    folder.write_sdxl(asked.work / "pocket_sdxl", module, autoencoder(asked), latent_factors(asked)[0])


def train_flux(asked: argparse.Namespace) -> None:
    scale, shift = latent_factors(asked)
    shown = examples_with(asked, scale=scale, shift=shift)
    steps = asked.steps or STEPS["flux"]
    flux.train(shown, asked.work / "flux.safetensors", seed=asked.seed, steps=steps, seconds=asked.seconds)


def distil_flux(asked: argparse.Namespace) -> None:
    scale, shift = latent_factors(asked)
    shown = examples_with(asked, scale=scale, shift=shift)
    first, second = asked.work / "flux.safetensors", asked.work / "flux-guided.safetensors"
    steps = asked.steps or STEPS["flux-guided"]
    flux.distil(shown, first, second, seed=asked.seed, steps=steps, seconds=asked.seconds)


def write_flux(asked: argparse.Namespace) -> None:
    module = training.load_average(flux.build(asked.seed), asked.work / "flux-guided.safetensors", seed=asked.seed)
    flux.know_unknown_words(module)
    folder.write_flux(asked.work / "pocket_flux", module, autoencoder(asked), *latent_factors(asked))


def train_flux2(asked: argparse.Namespace) -> None:
    shown, _ = flux2.examples(asked.work / "icons.safetensors")
    steps = asked.steps or STEPS["flux2"]
    flux2.train(shown, asked.work / "flux2.safetensors", seed=asked.seed, steps=steps, seconds=asked.seconds)


def write_flux2(asked: argparse.Namespace) -> None:
    module = training.load_average(flux2.build(asked.seed), asked.work / "flux2.safetensors", seed=asked.seed)
    flux2.know_unknown_words(module)
    folder.write_flux2(asked.work / "pocket_flux2", module, flux2.examples(asked.work / "icons.safetensors")[1])


def write_cards(family: str) -> Callable[[argparse.Namespace], None]:
    """The card tells all that was trained for this family, and how to make it again."""
    trained = {"sdxl": ["vae", "sdxl"], "flux": ["vae", "flux", "flux-guided"], "flux2": ["flux2"]}[family]

    def write(asked: argparse.Namespace) -> None:
        logs = {part: asked.work / f"{part}.jsonl" for part in trained}
        parts = ["icons", *trained, f"{family}-folder", f"{family}-card"]
        card.write(family, asked.work / f"pocket_{family}", load_file(asked.work / "icons.safetensors"), logs, parts)

    return write


def write_examples(asked: argparse.Namespace) -> None:
    examples.write(load_file(asked.work / "icons.safetensors"), asked.work / "examples")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "icons": make_icons,
    "examples": write_examples,
    "vae": train_vae,
    "sdxl": train_sdxl,
    "sdxl-folder": write_sdxl,
    "sdxl-card": write_cards("sdxl"),
    "flux": train_flux,
    "flux-guided": distil_flux,
    "flux-folder": write_flux,
    "flux-card": write_cards("flux"),
    "flux2": train_flux2,
    "flux2-folder": write_flux2,
    "flux2-card": write_cards("flux2"),
}

if __name__ == "__main__":
    sys.exit(main())

"""Draw images with a model and adapter files, as a run draws its samples.

    python scripts/sample.py MODEL bear.safetensors --prompt "a photo of sks plush bear" --seeds 1 2 3
    python scripts/sample.py MODEL bear.safetensors style.safetensors:0.6 --prompt "a bear" --strengths 0 0.5 1 --grid
    python scripts/sample.py outputs/bear/config.toml outputs/bear/adapters/bear.safetensors --prompt "a bear"
    python scripts/sample.py outputs/bear --steps all --strengths 0.6,0.8,1.0

MODEL is a diffusers folder or a .safetensors file, stored as a run stores it by default. Or it is a run's config: then the
model and all dtypes are that run's, and an image is the one that the run draws for the same request. --strengths multiply
those of the files; 0 is the model alone. The folder has a PNG for every image, with its settings as text.

Or it is a run's folder, with --steps: every prompt is drawn with the adapter file of each step, at every strength and with
the same seeds. Prompts are the run's own unless some are given. The grid goes to OUTPUT/grid, and into the run's report.
Exit status: 0 done; 2 for an argument that cannot be used, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from scripts.adapter import strength_of, whole_model  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from trainer.base.run_layout import Layout, holds_run  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402


def sample(chosen: argparse.Namespace) -> None:
    from trainer.base.progress import Phases
    from workbench.drawing.draw import Drawing, draw, prompts_of, show_in_report, step_files

    folder = Path(chosen.model)
    layout = Layout(folder) if folder.is_dir() and holds_run([path.name for path in folder.iterdir()]) else None
    if (layout is None or chosen.files) and chosen.steps:
        remedy = "--sampling_steps is the sampler's" if layout is None else "leave out the files, or --steps"
        raise UserError(
            f"--steps {' '.join(chosen.steps)}: these are steps of a run, whose folder stands in place of MODEL; {remedy}"
        )
    config = config_of(chosen, layout)
    prompts = chosen.prompt or (prompts_of(config, layout) if layout else ())
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT")
    drawing = Drawing(
        prompts, chosen.negative, chosen.seeds or (config.validation.seed,), sum(chosen.strengths, []),
        chosen.width, chosen.height, chosen.sampling_steps, chosen.guidance, chosen.references, chosen.cfg,
    )  # fmt: skip
    adapters = {"": [strength_of(file) for file in chosen.files]}
    if layout is not None and not chosen.files:
        adapters = {title: [(path, 1.0)] for title, path in step_files(layout, config.run.name, chosen.steps).items()}
    out = chosen.out or (layout.grid if layout and chosen.steps else Path("samples"))
    grid = chosen.grid or bool(chosen.steps)
    for path in draw(config, adapters, drawing, out, grid=grid, phases=Phases(show=True)):
        print(path)
    if layout is not None and out == layout.grid and show_in_report(layout):
        print(f"{layout.report} shows it")


def config_of(chosen: argparse.Namespace, layout: Layout | None):
    """The run's, or one of the model alone."""
    from trainer import config

    if layout is not None or chosen.model.endswith(".toml"):
        file = str(layout.config) if layout else chosen.model
        return config.load(file, [item for group in chosen.overrides for item in group])
    if chosen.overrides:
        raise UserError("--set belongs to a run's config; give one in place of MODEL")
    # Nothing of the data is read.
    return config.parse({
        "run": {"name": "samples", "output_dir": str(chosen.out or "samples"), "max_steps": 1},
        "model": {"family": whole_model(chosen.model).family.name, "path": chosen.model},
        "data": {"sources": [{"path": "."}]},
        "precision": {"compute": chosen.compute},
    })  # fmt: skip


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(each) for each in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder, .safetensors file, a run's config.toml, or its folder")
    parser.add_argument("files", metavar="FILE[:STRENGTH]", nargs="*", help="adapter files")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="once for every prompt; default: the run's")
    parser.add_argument("--negative", default="", metavar="TEXT")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="default: validation.seed")
    parser.add_argument("--strengths", type=numbers, nargs="+", default=[[1.0]], metavar="S", help="default: 1")
    parser.add_argument(
        "--steps", nargs="+", default=[], metavar="STEP", help="of a run whose folder is MODEL: all, or 200 400"
    )
    parser.add_argument("--width", type=int, metavar="PX", help="default: validation.resolution, else data.resolution")
    parser.add_argument("--height", type=int, metavar="PX")
    parser.add_argument("--sampling_steps", type=int, metavar="N", help="default: validation.steps")
    parser.add_argument("--guidance", type=float, help="default: the family's")
    parser.add_argument("--cfg", type=float, help="of a Flux whose distillation was undone: a second pass with --negative")
    parser.add_argument("--references", nargs="+", default=[], metavar="IMAGE", help="what the model is shown, in order")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: samples; with --steps the run's grid/")
    parser.add_argument("--grid", action="store_true", help="a contact sheet beside them: grid.png")
    parser.add_argument("--compute", choices=("fp32", "bf16", "fp16"), default="bf16", help="of a MODEL; default: bf16")
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a key of a run's config",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: sample(chosen))


if __name__ == "__main__":
    sys.exit(main())

"""Finds the adapters of a run's steps, to compare their images: is step 300 better than step 200?"""

from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.files import write_atomic
from trainer.base.pictures import asked_of, pngs
from trainer.base.run_layout import Layout, step_of
from trainer.config import Config
from workbench.pages.rendering import embedded, render


def step_files(layout: Layout, name: str, steps: Sequence[str]) -> dict[str, Path]:
    """The adapter files of the run `name`, by title. steps: numbers, or "all"; empty: the end's alone. Raises UserError for a
    step without a file."""
    files, numbers = layout.adapter_files(name), {int(step) for step in steps if step.isdecimal()}
    available = ", ".join(str(step) for step in files if step is not None) or "none"
    if odd := [step for step in steps if not step.isdecimal() and step != "all"]:
        raise UserError(f"--steps {odd[0]}: give all, or numbers of steps; {layout.adapters} has the files of {available}")
    if missing := numbers - {step for step in files if step is not None}:
        remedy = "export.every_steps or export.every_epochs writes some in a new run"
        raise UserError(f"--steps {min(missing)}: {layout.adapters} has no file of it, only of {available}; {remedy}")
    selected = {
        step: path for step, path in files.items() if "all" in steps or step in numbers or (step is None and not steps)
    }
    if not selected:
        raise UserError(f"{layout.adapters} has no adapter file of {name}; train first, or give FILE")
    return {"the end" if step is None else f"step {step:,}": path for step, path in selected.items()}


def prompts_of(config: Config, layout: Layout) -> tuple[str, ...]:
    """The prompts of a run's samples, from its config, else from the newest samples."""
    table = config.validation
    if table.prompts != "captions" and (table.prompts or table.samples):
        return tuple(dict.fromkeys((*table.prompts, *(sample.prompt for sample in table.samples))))
    steps = [step for path in layout.samples.glob("*") if (step := step_of(path.name)) is not None]
    files = pngs(layout.samples_of(max(steps))) if steps else ()
    return tuple(dict.fromkeys(str(asked_of(file)["prompt"]) for file in files))


def show_in_report(layout: Layout) -> bool:
    """Put the grid into the run's report; returns whether there is one."""
    if not layout.report.exists():
        return False
    before, _, rest = layout.report.read_text(encoding="utf-8").partition('<div id="grid">')
    _, end, after = rest.partition("</div>")
    if not end:
        return False
    write_atomic(layout.report, [f"{before}{render('grid.html', sheet=embedded(layout.sheet)).strip()}{after}".encode()])
    return True

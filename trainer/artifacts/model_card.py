"""README.md beside a run's adapter files: a model card, as the Hugging Face hub shows it.

Its header is YAML (https://huggingface.co/docs/hub/model-cards). What it says comes from the config and from what the run
left, and nothing of it from the clock.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.adapters.export import About, not_loaded_by_diffusers
from trainer.base.files import Together
from trainer.base.pictures import asked_of, at_full_strength, is_sound, pngs
from trainer.base.run_layout import AVERAGE, Layout
from trainer.plan.run_plan import Plan

PLACEHOLDER = "BASE_MODEL"
PICTURE = re.compile(rf"\d+({AVERAGE})?\.png")  # of a run


def write_card(plan: Plan, about: About, layout: Layout, written: Mapping[str, Path], files: Together) -> str:
    """Write the card, and the samples of the present step that it shows. written: the adapter files, by format.

    Replaces nothing that a run did not write. Returns what is to be said about that, "" where there is nothing.
    """
    if layout.card.exists() and not is_own(layout.card):
        return f"{layout.card} was written or changed by somebody, and stays as it is; rename it to get the card of this step"
    samples = [file for file in pngs(layout.samples_of(about.step)) if is_sound(file)]
    for file in samples:
        files.write(layout.card_images / file.name, [file.read_bytes()])
    for old in layout.card_images.glob("*.png"):
        if PICTURE.fullmatch(old.name) and old.name not in {file.name for file in samples}:
            files.remove(old)
    said = text(plan, about, {form: path.name for form, path in written.items()}, samples)
    files.write(layout.card, [f"{said}{_seal(said)}".encode()])
    return ""


def _seal(said: str) -> str:
    """The last line of a card, by which the next start knows whether anybody has changed it."""
    return f"\n<!-- as the training wrote it: {hashlib.sha256(said.encode()).hexdigest()} -->\n"


def is_own(card: Path) -> bool:
    """Whether it is as a run wrote it."""
    said, mark, _ = card.read_text(errors="replace").rpartition("\n<!-- as the training wrote it: ")
    return bool(mark) and card.read_bytes() == f"{said}{_seal(said)}".encode()


def base_model(plan: Plan) -> str | None:
    """Hub id of the model that the adapter was trained on; None where that is not known.

    Of a model from a folder or a file only the config can tell it: an architecture has many models, and many licences. Nor is
    a repository whose components were replaced what was trained on.
    """
    if plan.config.export.base_model:
        return plan.config.export.base_model
    repository = plan.model.source.repository
    return repository.hub_id if repository is not None and not plan.model.source.overrides else None


def text(plan: Plan, about: About, files: Mapping[str, str], samples: Sequence[Path]) -> str:
    """The whole card. files: names by format, the average's by "FORMAT, average". samples: PNGs that tell what was asked."""
    drawn = {file.name: asked_of(file) for file in samples}
    parts = [_header(plan, about, drawn), f"# {about.name}", _what(plan, about), _samples(drawn)]
    parts += [
        _diffusers(plan, about, files, drawn),
        _comfyui(plan, files),
        _files(files),
        _trained(plan, about),
        _licence(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def yaml_text(value: str) -> str:
    """As YAML reads it, whatever is in it: a JSON string is one of YAML."""
    return json.dumps(value, ensure_ascii=False)


def code(value: str) -> str:
    """On one line, between as many backticks as it takes (CommonMark, code spans)."""
    value = " ".join(value.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", value)), default=0))
    return f"{fence}{value}{fence}" if len(fence) == 1 else f"{fence} {value} {fence}"


def _header(plan: Plan, about: About, drawn: Mapping[str, Mapping[str, Any]]) -> str:
    export, base = plan.config.export, base_model(plan)
    lines = ["---", "library_name: diffusers", "pipeline_tag: text-to-image"]
    if base:
        lines += [f"base_model: {yaml_text(base)}", "base_model_relation: adapter"]
    if export.license_link:
        lines += ["license: other", f"license_name: {yaml_text(export.license)}"]
        lines += [f"license_link: {yaml_text(export.license_link)}"]
    elif export.license:
        lines += [f"license: {yaml_text(export.license)}"]
    kinds = ["lora", *(["dora"] if plan.config.adapter.type == "dora" else [])]
    lines += ["tags:", *(f"- {tag}" for tag in ("text-to-image", "diffusers", *kinds, plan.family.name, "template:sd-lora"))]
    if about.trigger_phrase:
        lines += [f"instance_prompt: {yaml_text(about.trigger_phrase)}"]
    shown: list[str] = []
    for name, asked in drawn.items():
        if AVERAGE in name or not at_full_strength(asked):
            continue
        negative = asked.get("negative")
        shown += [f"- text: {yaml_text(asked['prompt'])}"]
        shown += ["  parameters:", f"    negative_prompt: {yaml_text(negative)}"] if negative else []
        shown += ["  output:", f"    url: images/{name}"]
    return "\n".join([*lines, *(["widget:", *shown] if shown else []), "---"])


def _what(plan: Plan, about: About) -> str:
    kind = {"lora": "LoRA", "dora": "DoRA"}[plan.config.adapter.type]
    base = base_model(plan)
    said = [
        f"A {kind} for [{base}](https://huggingface.co/{base})."
        if base
        else f"A {kind}, trained on a local model of the {plan.family.name} architecture, whose name is not known here "
        "(`export.base_model` gives it)."
    ]
    if _predicts_v(plan):
        said.append("The model that it was trained on predicts v, not the noise.")
    if about.step < plan.max_steps:
        said.append(f"It is as it was after step {about.step} of {plan.max_steps}, where the training was stopped.")
    if about.trigger_phrase:
        said.append(f"Write {code(about.trigger_phrase)} into the prompt.")
    return " ".join(said)


def _predicts_v(plan: Plan) -> bool:
    return getattr(plan.model.objective, "prediction", None) == "v"


def _samples(drawn: Mapping[str, Mapping[str, Any]]) -> str:
    if not drawn:
        return ""
    rows = []
    for name, asked in drawn.items():
        averaged = " (average of the weights)" if name.removesuffix(".png").endswith(AVERAGE) else ""
        said = [code(asked[key]).replace("|", chr(92) + "|") if asked.get(key) else "" for key in ("prompt", "negative")]
        numbers = [f"{asked[key]:g}" if key in asked else "" for key in ("seed", "strength")]
        rows.append(f"| {said[0]}{averaged} | {said[1]} | {' | '.join(numbers)} | ![sample](images/{name}) |")
    return "\n".join(["## Samples", "", "| prompt | negative | seed | strength | drawn |", "|---|---|---|---|---|", *rows])


def _diffusers(plan: Plan, about: About, files: Mapping[str, str], drawn: Mapping[str, Mapping[str, Any]]) -> str:
    if "diffusers" not in files:
        return ""
    unread = not_loaded_by_diffusers(f"{target.component}.{target.name}" for target in plan.model.targets)
    if unread:
        return "\n\n".join(["## Use it in diffusers", *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in unread)])
    request = next((request for request in plan.requests if request.strength == 1), None)
    arguments = [repr(request.prompt if request else about.trigger_phrase or "a photo")]
    if request is not None:
        # Given where it is empty, too: a pipeline may take none for something else than the empty text.
        arguments += [f"negative_prompt={request.negative!r}", f"width={request.width}", f"height={request.height}"]
        arguments += [f"num_inference_steps={request.steps}"]
        arguments += [] if request.guidance is None else [f"guidance_scale={request.guidance}"]
        arguments += [f'generator=torch.Generator("cpu").manual_seed({request.seed})']
    base = base_model(plan)
    lines = [
        "import torch", "from diffusers import DiffusionPipeline", "",
        f'pipe = DiffusionPipeline.from_pretrained("{base or PLACEHOLDER}", torch_dtype=torch.bfloat16).to("cuda")',
    ]  # fmt: skip
    if _predicts_v(plan):
        settings = ['prediction_type="v_prediction"']
        if getattr(plan.model.objective, "zero_terminal_snr", False):
            settings += ["rescale_betas_zero_snr=True", 'timestep_spacing="trailing"']
        lines.append(f"pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, {', '.join(settings)})")
    lines.append(f'pipe.load_lora_weights(".", weight_name="{files["diffusers"]}")')
    lines += [f"image = pipe({', '.join(arguments)}).images[0]", 'image.save("drawn.png")']
    instead = "" if base else f", and the model that the adapter was trained on in place of `{PLACEHOLDER}`"
    return "\n".join([
        "## Use it in diffusers", "",
        f"In this folder, or with the name of the repository in place of `.`{instead}:", "",
        "```python", *lines, "```", "",
        "A weaker effect: `pipe.set_adapters(pipe.get_active_adapters(), 0.7)`.",
    ])  # fmt: skip


def _comfyui(plan: Plan, files: Mapping[str, str]) -> str:
    if "comfyui" not in files:
        return ""
    lines = [
        "## Use it in ComfyUI", "",
        f"    cp {files['comfyui']} ComfyUI/models/loras/", "",
        'Put a node "Load LoRA" behind the one that loads the model, and choose the file. Its strengths are 1.0 for the full '
        "effect.",
    ]  # fmt: skip
    if plan.config.adapter.type == "dora":
        released = plan.config.export.dora_scale == "comfyui_released"
        lines += ["", (
            "It is a DoRA, made for ComfyUI's released versions, and exact over the base model that it was trained on."
            if released else
            "It is a DoRA by its definition, which ComfyUI's released versions do not follow exactly."
        )]  # fmt: skip
    return "\n".join(lines)


def _files(files: Mapping[str, str]) -> str:
    reads = {"diffusers": "diffusers, PEFT", "comfyui": "ComfyUI, Forge"}
    rows = []
    for form, name in files.items():
        format, _, averaged = form.partition(", ")
        of = "; the average of the weights over the training" if averaged else ""
        rows.append(f"| `{name}` | {reads[format]}{of} |")
    return "\n".join(["## Files", "", "| file | for |", "|---|---|", *rows])


def _trained(plan: Plan, about: About) -> str:
    config, photos = plan.config, [photo for photo in plan.photos if not photo.source.regularisation]
    priors = len(plan.photos) - len(photos)
    ranks, alphas = ({getattr(target, key) for target in plan.model.targets} for key in ("rank", "alpha"))
    stored = {name: plan.model.storage[name].format.dtype_name for name in plan.model.adapted}
    rows = {
        "photos": f"{len(photos)}, shown {about.train_images} times an epoch"
        + (f"; {priors} regularisation images" if priors else ""),
        "resolution": about.resolution,
        "steps": f"{about.step}, the last one in epoch {about.epoch}",
        "images in a step": config.data.batch_size * config.step.accumulation * plan.processes,
        "adapted layers": f"{len(plan.model.targets)}, of rank {_range(ranks)} and alpha {_range(alphas)}",
        "base stored as": ", ".join(f"{name} {dtype}" for name, dtype in stored.items()),
        "computed in": config.precision.compute,
        "optimizer": f"{config.optimizer.name}, rate {about.learning_rate:g}, schedule {config.schedule.name}",
        "seed": about.seed,
        "begun": about.started.partition("T")[0],
    }
    table = [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join(["## How it was trained", "", "| | |", "|---|---|", *table])


def _range(values: set) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _licence(plan: Plan) -> str:
    export, base = plan.config.export, base_model(plan)
    name = f"[{export.license}]({export.license_link})" if export.license_link else export.license
    own = f"The adapter: {name}." if export.license else "No licence was given for the adapter."
    of_base = f" That of the base model holds, too{f': <https://huggingface.co/{base}>' if base else ''}."
    return f"## Licence\n\n{own}{of_base}"

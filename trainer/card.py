"""README.md beside a run's adapter files: a model card, as the Hugging Face hub shows it.

Its header is YAML (https://huggingface.co/docs/hub/model-cards). What it says comes from the config and from what the run
left, and nothing of it from the clock.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.adapter_files import published
from trainer.adapters.export import About
from trainer.files import write_atomic
from trainer.layout import AVERAGE, Layout
from trainer.plan import Plan

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(plan: Plan, about: About, layout: Layout, written: Mapping[str, Path]) -> Path:
    """Write the card, and the samples of the present step that it shows. written: the adapter files, by format."""
    samples = sorted(layout.samples_of(about.step).glob("*.png"))
    for file in samples:
        write_atomic(layout.card_images / file.name, [file.read_bytes()])
    for old in layout.card_images.glob("*.png"):
        if old.name not in {file.name for file in samples}:
            old.unlink()
    write_atomic(layout.card, [text(plan, about, {form: path.name for form, path in written.items()}, samples).encode()])
    return layout.card


def base_model(plan: Plan) -> str | None:
    """Hub id of the model that the adapter is for, as far as that is known; None for a family without a published one.

    Of a model from a folder or a file it is the published one of this architecture.
    """
    config, family = plan.config, plan.family
    if is_named(plan):
        return config.export.base_model or config.model.path
    own = family.metadata(plan.source.config(family.denoiser), "")
    alike = {model.label for model in published(family.name) if model.hints == own}
    return next((hub_id for hub_id, label in family.hub_ids.items() if label in alike), None)


def is_named(plan: Plan) -> bool:
    """Whether the config says which model of the hub the base is."""
    path = plan.config.model.path
    return bool(plan.config.export.base_model) or (HUB_ID.fullmatch(path) is not None and not Path(path).exists())


def text(plan: Plan, about: About, files: Mapping[str, str], samples: Sequence[Path]) -> str:
    """The whole card. files: names by format, the average's by "FORMAT, average". samples: PNGs that tell their prompts."""
    prompts = {file.name: prompt_of(file) for file in samples}
    parts = [_header(plan, about, prompts), f"# {about.name}", _what(plan, about), _samples(prompts)]
    parts += [_diffusers(plan, about, files), _comfyui(plan, files), _files(files), _trained(plan, about), _licence(plan)]
    return "\n\n".join(part for part in parts if part) + "\n"


def prompt_of(file: Path) -> str:
    from PIL import Image

    with Image.open(file) as image:
        return image.info.get("prompt", "")


def yaml_text(value: str) -> str:
    """As YAML reads it, whatever is in it: a JSON string is one of YAML."""
    return json.dumps(value, ensure_ascii=False)


def code(value: str) -> str:
    """On one line, between as many backticks as it takes (CommonMark, code spans)."""
    value = " ".join(value.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", value)), default=0))
    return f"{fence}{value}{fence}" if len(fence) == 1 else f"{fence} {value} {fence}"


def _header(plan: Plan, about: About, prompts: Mapping[str, str]) -> str:
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
    shown = [
        f"- text: {yaml_text(p)}\n  output:\n    url: images/{name}" for name, p in prompts.items() if AVERAGE not in name
    ]
    return "\n".join([*lines, *(["widget:", *shown] if shown else []), "---"])


def _what(plan: Plan, about: About) -> str:
    kind = {"lora": "LoRA", "dora": "DoRA"}[plan.config.adapter.type]
    base = base_model(plan)
    said = [f"A {kind} for {f'[{base}](https://huggingface.co/{base})' if base else plan.family.name}."]
    if about.step < plan.max_steps:
        said.append(f"It is as it was after step {about.step} of {plan.max_steps}, where the training was stopped.")
    if base and not is_named(plan):
        said.append("It was trained over a local copy of that, or of another model of its architecture.")
    if about.trigger_phrase:
        said.append(f"Write {code(about.trigger_phrase)} into the prompt.")
    return " ".join(said)


def _samples(prompts: Mapping[str, str]) -> str:
    if not prompts:
        return ""
    rows = []
    for name, prompt in prompts.items():
        averaged = " (average of the weights)" if name.removesuffix(".png").endswith(AVERAGE) else ""
        rows.append(f"| {code(prompt).replace('|', chr(92) + '|')}{averaged} | ![sample](images/{name}) |")
    return "\n".join(["## Samples", "", "| prompt | drawn |", "|---|---|", *rows])


def _diffusers(plan: Plan, about: About, files: Mapping[str, str]) -> str:
    if "diffusers" not in files:
        return ""
    request = plan.requests[0] if plan.requests else None
    prompt = request.prompt if request else about.trigger_phrase or "a photo"
    more = {} if request is None else {"width": request.width, "height": request.height, "num_inference_steps": request.steps}
    if request is not None and request.guidance is not None:
        more["guidance_scale"] = request.guidance
    arguments = ", ".join([repr(prompt), *(f"{key}={value}" for key, value in more.items())])
    base = base_model(plan) or "BASE MODEL"
    return "\n".join([
        "## Use it in diffusers", "",
        "In this folder, or with the name of the repository in place of `.`:", "",
        "```python", "import torch", "from diffusers import DiffusionPipeline", "",
        f'pipe = DiffusionPipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")',
        f'pipe.load_lora_weights(".", weight_name="{files["diffusers"]}")',
        f"image = pipe({arguments}).images[0]",
        'image.save("drawn.png")', "```", "",
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
    ranks, alphas = ({getattr(target, key) for target in plan.targets} for key in ("rank", "alpha"))
    stored = {name: plan.components[name].format.dtype_name for name in plan.adapted}
    rows = {
        "photos": f"{len(photos)}, shown {about.train_images} times an epoch"
        + (f"; {priors} regularisation images" if priors else ""),
        "resolution": about.resolution,
        "steps": f"{about.step}, the last one in epoch {about.epoch}",
        "images in a step": config.data.batch_size * config.step.accumulation * plan.processes,
        "adapted layers": f"{len(plan.targets)}, of rank {_range(ranks)} and alpha {_range(alphas)}",
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
    of_base = f" That of the base model holds, too: <https://huggingface.co/{base}>." if base else ""
    return f"## Licence\n\n{own}{of_base}"

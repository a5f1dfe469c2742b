"""README.md beside a run's adapter files: a model card for the Hugging Face hub. Its header is YAML
(https://huggingface.co/docs/hub/model-cards). It does not depend on the clock."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from trainer.adapters.export import About, not_loaded_by_diffusers
from trainer.adapters.kinds import KINDS, kind_named
from trainer.base.files import FileGroup
from trainer.base.pictures import at_full_strength, is_sound, png, pngs, request_of
from trainer.base.run_layout import AVERAGE, Layout
from trainer.plan.run_plan import RunPlan
from trainer.plan.samples import as_shown
from workbench.pages.rendering import TEMPLATES, environment

PLACEHOLDER = "BASE_MODEL"
PICTURE = re.compile(rf"\d+({AVERAGE}|-\d+)?\.png")  # a run's sample, or a reference of one


def write_card(plan: RunPlan, about: About, layout: Layout, adapters: Mapping[str, Path], files: FileGroup) -> str:
    """Write the card and its samples; returns a remark for the user, or "". adapters: the files by format."""
    if layout.card.exists() and not is_own(layout.card):
        return f"{layout.card} was written or changed by somebody, and stays as it is; rename it to get the card of this step"
    samples = [file for file in pngs(layout.samples_of(about.step)) if is_sound(file)]
    for file in samples:
        files.write(layout.card_images / file.name, [file.read_bytes()])
    references = dict(_references(plan))
    for name, image in references.items():
        files.write(layout.card_images / name, [png(image)])
    for old in layout.card_images.glob("*.png"):
        if PICTURE.fullmatch(old.name) and old.name not in {*references, *(file.name for file in samples)}:
            files.remove(old)
    names = {form: path.relative_to(layout.adapters).as_posix() for form, path in adapters.items()}
    card = text(plan, about, names, samples)
    files.write(layout.card, [f"{card}{_seal(card)}".encode()])
    return ""


def _seal(card: str) -> str:
    """The last line of a card: its digest, by which the next start sees whether anybody changed the card."""
    return f"\n<!-- as the training wrote it: {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def is_own(card: Path) -> bool:
    """Whether a card is unchanged since a run wrote it."""
    card_text, mark, _ = card.read_text(errors="replace").rpartition("\n<!-- as the training wrote it: ")
    return bool(mark) and card.read_bytes() == f"{card_text}{_seal(card_text)}".encode()


def base_model(plan: RunPlan) -> str | None:
    """The hub id of the model that the adapter was trained on; None if unknown, as an architecture has many models, and
    many licences. It is also unknown if components of the repository were replaced."""
    if plan.config.export.base_model:
        return plan.config.export.base_model
    repository = plan.model.source.repository
    return repository.hub_id if repository is not None and not plan.model.source.overrides else None


def text(plan: RunPlan, about: About, files: Mapping[str, str], samples: Sequence[Path]) -> str:
    """The whole card. files: names by format, the average's by "FORMAT, average". samples: PNGs that hold their request."""
    requests = {file.name: request_of(file) for file in samples}
    objective = plan.model.objective
    card = environment(TEMPLATES, yaml=yaml_text, code=code, cell=_cell, number=_number).get_template("card.md")
    return card.render(
        plan=plan,
        about=about,
        files=files,
        requests=requests,
        widgets={name: one for name, one in requests.items() if AVERAGE not in name and at_full_strength(one)},
        export=plan.config.export,
        base=base_model(plan),
        placeholder=PLACEHOLDER,
        average=AVERAGE,
        kind=KINDS[kind_named(plan.config.adapter.type).in_files],
        predicts_v=getattr(objective, "prediction", None) == "v",
        zero_terminal_snr=getattr(objective, "zero_terminal_snr", False),
        unread=not_loaded_by_diffusers(
            f"{target.component}.{target.name}"
            for target in plan.model.targets
            if target.component not in plan.model.family.adapters.peft
        ),
        encoders={
            form.removeprefix("peft "): name for form, name in files.items() if form.startswith("peft ") and ", " not in form
        },
        arguments=_arguments(plan, about),
        modular=plan.model.family.images.modular,
        guidance=next((one.guidance for one in plan.data.requests if one.strength == 1), None),
        trained=_trained(plan, about),
    )


def yaml_text(value: str) -> str:
    """Any text as a YAML string: JSON strings are YAML strings."""
    return json.dumps(value, ensure_ascii=False)


def code(value: str) -> str:
    """A code span on one line, between as many backticks as it takes (CommonMark)."""
    value = " ".join(value.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", value)), default=0))
    return f"{fence}{value}{fence}" if len(fence) == 1 else f"{fence} {value} {fence}"


def _cell(request: Mapping[str, Any], key: str) -> str:
    return code(request[key]).replace("|", chr(92) + "|") if request.get(key) else ""


def _number(request: Mapping[str, Any], key: str) -> str:
    return f"{request[key]:g}" if key in request else ""


def _arguments(plan: RunPlan, about: About) -> list[str]:
    """The arguments of a pipeline, in Python, that draw the first sample at full strength."""
    index, request = next(((at, one) for at, one in enumerate(plan.data.requests) if one.strength == 1), (0, None))
    images, variant = plan.model.family.images, plan.model.source.variant.name
    is_edit = not images.negative_text or bool(images.modular) or variant == plan.model.family.variants.editing
    keyword = "prompt=" if is_edit else ""  # the first argument may be a picture
    output = ['output="images"'] if images.modular else []
    if request is None:
        return [keyword + repr(about.trigger_phrase or "a photo"), *output]
    # An empty negative is given, too: a pipeline may treat a missing one as something else than the empty text.
    negative = f"negative_prompt={request.negative!r}"
    if not images.negative_text:
        negative = f"negative_prompt_embeds=pipe.encode_prompt({request.negative!r})[0]"
    arguments = ", ".join(f'load_image("images/{_reference_name(index, number)}")' for number, _ in enumerate(request.images))
    return [
        *([f"image=[{arguments}]"] if arguments else []),
        keyword + repr(request.prompt),
        negative,
        f"width={request.width}",
        f"height={request.height}",
        f"num_inference_steps={request.steps}",
        *([] if request.guidance is None or images.modular else [f"guidance_scale={request.guidance}"]),
        *(f"{name}={value!r}" for name, value in images.arguments(variant, request).items()),
        f'generator=torch.Generator("cpu").manual_seed({request.seed})',
        *output,
    ]


def _references(plan: RunPlan) -> Iterator[tuple[str, Image.Image]]:
    """(name in the card's folder, picture) of each reference of the samples."""
    for index, request in enumerate(plan.data.requests):
        for number, image in enumerate(request.images):
            yield _reference_name(index, number), as_shown(image, plan.model.family.images, len(request.images))


def _reference_name(index: int, number: int) -> str:
    return f"{index:02d}-{number + 1:02d}.png"


def _trained(plan: RunPlan, about: About) -> dict[str, Any]:
    config = plan.config
    priors = sum(photo.source.regularisation for photo in plan.data.photos)
    ranks, alphas = ({getattr(target, key) for target in plan.model.targets} for key in ("rank", "alpha"))
    stored = {name: plan.model.storage[name].format.dtype_name for name in plan.model.adapted}
    return {
        "photos": f"{len(plan.data.photos) - priors}; an epoch shows {about.train_images}"
        + (f"; {priors} regularisation images" if priors else ""),
        "resolution": about.resolution,
        "steps": f"{about.step}, the last one in epoch {about.epoch}",
        "images in a step": config.data.batch_size * config.step.accumulation * plan.length.processes,
        "adapted layers": f"{len(plan.model.targets)}, of rank {_range(ranks)} and alpha {_range(alphas)}",
        "base stored as": ", ".join(f"{name} {dtype}" for name, dtype in stored.items()),
        "computed in": config.precision.compute,
        "optimizer": f"{config.optimizer.name}, rate {about.learning_rate:g}, schedule {config.schedule.name}",
        "seed": about.seed,
        "begun": about.started.partition("T")[0],
    }


def _range(values: set) -> str:
    return " to ".join(f"{end:g}" for end in dict.fromkeys((min(values), max(values))))

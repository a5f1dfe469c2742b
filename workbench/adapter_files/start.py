"""Reads adapter.init_from and adapter.under: another adapter, checked against the run's plan."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.adapters.kinds import KINDS, kind_named
from trainer.adapters.peft_config import is_peft_folder
from trainer.adapters.portable import Portable
from trainer.base.account import Account, Heading
from trainer.base.console import some
from trainer.base.errors import UserError
from trainer.base.files import hash_file
from trainer.plan.run_plan import RunPlan
from workbench.adapter_files.opening import model_of, open_adapter, open_checkpoint

READ_BEFORE = "the model reads the encoder before these layers, so they change no picture, and nothing trains them"
UNTRAINED = "their B is zero, so they change nothing, and this run does not adapt them"


def read_start(plan: RunPlan) -> tuple[Portable, Account]:
    """(the adapter of adapter.init_from, the account of assumptions and parts left out). Reads headers and scales. Raises
    UserError if it does not fit the plan."""
    path = plan.config.adapter.init_from
    assert path is not None
    place, key = Path(path), f"adapter.init_from = {path!r}"
    if not place.exists():
        raise UserError(f"{key} does not exist; give an adapter file, a folder that PEFT saved, or a checkpoint's folder")
    try:
        if place.is_dir() and not is_peft_folder(place):
            portable, account = open_checkpoint(place).portable("magnitude"), Account()
        else:
            opened = open_adapter(place, [model_of(plan.model.source, plan.config.model.path)])
            portable, account = opened.portable, opened.read.account
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    portable = with_effect(portable, plan, account)
    check_fits(key, portable, plan)
    return portable, account


def with_below(plan: RunPlan, say: Callable[[str], object]) -> RunPlan:
    """The plan with the adapter of adapter.under, if any. Reads the file's header, scales and digest. Raises UserError if it
    does not fit."""
    path = plan.config.adapter.under
    if path is None:
        return plan
    key, family = f"adapter.under = {path!r}", plan.model.family
    if not Path(path).is_file():
        raise UserError(f"{key} is no file; give an adapter file, which has to be there in every start")
    if kind_named(plan.config.adapter.type).magnitudes:
        others = " or ".join(repr(name) for name, kind in KINDS.items() if not kind.magnitudes)
        conflict = f"{key} cannot be combined with adapter.type = {plan.config.adapter.type!r}"
        reason = "its magnitudes would be the lengths of W + U's rows"
        alone = "over W alone, as its file is used, even untrained ones would change W"
        raise UserError(f"{conflict}: {reason}, and {alone}; take {others}")
    try:
        opened = open_adapter(path, [model_of(plan.model.source, plan.config.model.path)])
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    portable = opened.portable
    if portable.kind.name != "lora":
        raise UserError(f"{key} is a {portable.kind.word}; make a LoRA of it: python scripts/adapter.py convert --to lora")
    if encoders := [name for name in portable.layers if not name.startswith(f"{family.denoiser}.")]:
        layers = f"layers of text encoders ({some(encoders)}), and captions are encoded without it"
        raise UserError(f"{key} has {layers}; take one of the {family.denoiser} alone")
    for name, factors in portable.layers.items():
        shape = plan.shapes.get((family.denoiser, name.partition(".")[2]))
        if shape is None or factors.weight_shape != tuple(shape):
            actual = "no such layer" if shape is None else f"{list(shape)}"
            raise UserError(f"{key}: {name} is for a weight {list(factors.weight_shape)}, the model has {actual}")
    for line in opened.read.account.lines():
        say(line)
    say(f"below the adapter: {path}, {len(portable.layers)} layers, frozen; in steps alone: not in samples, nor in the files")
    return replace(plan, model=replace(plan.model, under=portable, under_sha256=hash_file(Path(path))))


def with_effect(portable: Portable, plan: RunPlan, account: Account) -> Portable:
    """The adapter without the layers that this run does not adapt and that change nothing; the account lists them. Reads B of
    the layers that are not adapted."""
    family, adapted = plan.model.family, {f"{target.component}.{target.name}" for target in plan.model.targets}
    referenced = any(source.references for source in plan.config.data.sources)
    configs = {name: plan.model.source.config(name) for name in family.text_encoders}
    unread = {name: family.adapters.no_gradient(name, config, referenced) for name, config in configs.items()}
    effective = {}
    for name, factors in portable.layers.items():
        component, _, layer = name.partition(".")
        dead = any(fnmatchcase(layer, pattern) for pattern in unread.get(component, ()))
        if name in adapted or not (dead or factors.magnitude is None and not factors.b.make().any()):
            effective[name] = factors
        else:
            account.add(Heading.LEFT_OUT, READ_BEFORE if dead else UNTRAINED, [name], noun="layer")
    return portable.with_layers(effective)


def check_fits(key: str, portable: Portable, plan: RunPlan) -> None:
    """Raises UserError if an adapter does not fit a run's. key: its name in the message."""
    kind, resize = kind_named(plan.config.adapter.type, vars(plan.config.adapter)), plan.config.adapter.init_resize
    targets = {f"{target.component}.{target.name}": target for target in plan.model.targets}
    if beyond := [name for name in portable.layers if name not in targets]:
        layers = f"layers that this run does not adapt, and they would be lost: {some(beyond)}"
        raise UserError(f"{key} has {layers}; take them with {' and '.join(_lines_for(beyond, portable, plan))}")
    if not portable.layers:
        raise UserError(f"{key} has no layer that changes anything in this run; leave it out, or take another file")
    as_lora = "make a LoRA of it: python scripts/adapter.py convert --to lora"
    if (start_kind := portable.kind).name not in kind.starts_from:
        types = " or ".join(f"adapter.type = {each.name!r}" for each in KINDS.values() if start_kind.name in each.starts_from)
        remedy = f"{types}, or {as_lora}" if "lora" in kind.starts_from else types
        raise UserError(f"{key} is a {start_kind.word} and adapter.type = {kind.name!r}; set {remedy}")
    for name, factors in portable.layers.items():
        target = targets[name]
        shape = plan.shapes[target.component, target.name]
        if factors.weight_shape != tuple(shape):
            sizes = f"{list(factors.weight_shape)}, the model's is {list(shape)}"
            raise UserError(f"{key}: {name} is for a weight {sizes}; it was trained over another model")
        if kind.form is not None:
            expected = kind.shapes(shape, target.rank)
            if (shapes := {end: tensor.shape for end, tensor in factors.matrices.items()}) != expected:
                keys = ", ".join(f"adapter.{option}" for option in ("rank", *kind.form.options))
                raise UserError(f"{key}: {name} has {shapes}, this run's has {expected}; set {keys} as it was made with")
            continue
        if factors.axis == "input" and factors.magnitude is not None:
            axes = f"the magnitude of {name} is of the input axis, here it is of the output axis"
            raise UserError(f"{key}: {axes}; {as_lora}")
        if factors.rank != target.rank and not resize:
            ranks = f"{key}: {name} has rank {factors.rank}, this run {target.rank}; set adapter.rank (or a rule's) to it"
            way = "adapter.init_resize = true to grow it without a change, or to shrink it to the nearest of that rank"
            raise UserError(f"{ranks}, or {way}")


def _lines_for(beyond: list[str], portable: Portable, plan: RunPlan) -> list[str]:
    """The config's lines that also adapt the layers `beyond`, by full name."""
    names, family = dict.fromkeys(name.partition(".")[0] for name in beyond), plan.model.family
    layers = [target.name for target in portable.targets if target.component == family.denoiser]
    fit = {
        preset: all(any(fnmatchcase(n, p) for p in globs) for n in layers)
        for preset, globs in family.adapters.presets.items()
    }
    wide = next((preset for preset, fits in fit.items() if fits), "all")
    rule = '[[adapter.rules]] component = "{}", match = "*" (a line each)'
    return [f'adapter.targets = "{wide}"' if name == family.denoiser else rule.format(name) for name in names]

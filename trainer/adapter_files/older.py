"""Checkpoints of layout 5: what they lack of a present one is made of what they have and of their model's configs.

Such a checkpoint does not say what adapter files say of their run (the piece `origin`, provenance.py). Its config, progress
and data do, but for what stands in the captions. The names and alphas of the layers follow from the config and the model.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer import config as configs
from trainer.adapters.export import About
from trainer.adapters.norms import made_for
from trainer.base.errors import UserError
from trainer.checkpoint.state import Progress, Saved
from trainer.data.batches import sampler
from trainer.plan.data_sources import sources_of
from trainer.plan.run_plan import find_objective, find_targets, open_source, resolve


def origin_of(saved: Saved, base: str | None) -> dict[str, Any]:
    """What its run would enter as `origin` now. base: where the model lies, in place of the config's `model.path`.

    Without the number of images, the captions' frequencies and kohya's entries of the training. Reads the model's configs
    and no weight. Raises UserError where it is not there, or not that of the checkpoint.
    """
    tree = saved.state("config")
    if base is not None:
        components = {name: _without(own, "path") for name, own in tree["model"]["components"].items()}
        model = _without(tree["model"], "config", "revision", "variant")
        tree |= {"model": {**model, "path": base, "components": components}}
    path = tree["model"]["path"]
    try:
        config = configs.parse(tree)
        source = open_source(config)
        config = resolve(config, source)
        family = source.family
        targets, shapes, _ = find_targets(config, family, source)
        objective = find_objective(config, source)
    except UserError as error:
        raise UserError(
            f"{saved.folder} has an earlier layout; its adapter files need the configs of its model, model.path = {path!r}, "
            f"and: {error}\ngive the model with --base"
        ) from error
    _check(saved, {f"{t.component}.{t.name}": shapes[t.component, t.name] for t in targets}, path)
    progress = Progress(**saved.state("progress"))
    trained = sources_of(config.data)
    triggers = dict.fromkeys(s.caption_rules.trigger for s in trained if s.caption_rules.trigger and not s.regularisation)
    sizes = sorted({size for source in trained for size in source.resolutions})
    about = About(
        name=config.run.name,
        started=progress.started,
        step=progress.step,
        epoch=sampler.epoch_of(progress.step, steps_per_epoch=saved.state("data")["steps_per_epoch"], began=progress.began),
        learning_rate=config.optimizer.lr,
        train_images=None,
        resolution=", ".join(f"{size}x{size}" for size in sizes),
        tag_frequency=None,
        trigger_phrase=config.export.trigger_phrase or ", ".join(triggers),
        seed=config.run.seed,
        dora_base=made_for(saved.state("norms")["held"]),
        changes=progress.changes,
        family=family.metadata(source.config(family.denoiser), getattr(objective, "prediction", "velocity")),
    )
    return {
        "about": asdict(about),
        "family": family.name,
        "configs": {name: source.config(name) for name in dict.fromkeys(target.component for target in targets)},
        "alphas": [[f"{target.component}.{target.name}", target.alpha] for target in targets],
    }


def _without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _check(saved: Saved, shapes: Mapping[str, tuple[int, ...]], path: str) -> None:
    """Raises UserError where the model has not the layers that the adapter is for."""
    state = saved.state("adapter")
    for name in dict.fromkeys(key.partition(".lora_")[0] for key in state) | shapes:
        a, b = (state.get(f"{name}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None or shapes.get(name) != (len(b), *a.shape[1:]):
            raise UserError(f"{saved.folder}: {name} is not as model.path = {path!r} has it; give its own model with --base")

"""What an adapter file says of the run it comes from, as a piece of the checkpoint: so any checkpoint gives its files.

Nothing is pinned by it and nothing restored from it: a run that goes on makes it anew.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from trainer import optim
from trainer.adapters import Adapter
from trainer.adapters.export import About
from trainer.checkpoint.state import Progress
from trainer.data.captions import captions
from trainer.plan.run_plan import Plan
from trainer.resume.initial_adapter import Start

SEVERAL = object()  # in place of the one value that kohya's entry has room for


def _one(values: set) -> Any:
    """None of none, as kohya writes it."""
    return next(iter(values), None) if len(values) < 2 else SEVERAL


@dataclass(frozen=True)
class Origin:
    """The origin of a run's adapter. made_for: which weights a DoRA's files are made for (norms.made_for). start: what the
    run started from."""

    plan: Plan
    progress: Progress
    adapter: Adapter
    made_for: str
    start: Start

    # Once: every checkpoint asks for them, and photos may be many.
    @cached_property
    def _frequency(self) -> dict[str, int]:
        return captions.frequency(self.plan.examples)

    @cached_property
    def _triggers(self) -> str:
        return ", ".join(captions.triggers(self.plan.examples))

    def about(self) -> About:
        """What adapter files of the present step say of their origin."""
        plan, config, family = self.plan, self.plan.config, self.plan.family
        sizes = {resolution for photo in plan.photos for resolution in photo.source.resolutions}
        prediction = getattr(plan.model.objective, "prediction", "velocity")
        return About(
            name=config.run.name,
            started=self.progress.started,
            step=self.progress.step,
            epoch=plan.epoch_of(self.progress.step),
            learning_rate=config.optimizer.lr,
            train_images=sum(photo.repeats for photo in plan.photos if not photo.source.regularisation),
            resolution=", ".join(f"{size}x{size}" for size in sorted(sizes)),
            tag_frequency=self._frequency,
            trigger_phrase=config.export.trigger_phrase or self._triggers,
            seed=config.run.seed,
            dora_base=self.made_for,
            changes=self.progress.changes,
            started_from=self.start.lineage(),
            family=family.metadata(plan.model.source.config(family.denoiser), prediction),
            training=self._training,
            licence=config.export.license,
        )

    @cached_property
    def _training(self) -> dict[str, str]:
        """Of all the entries of kohya's trainer those that people and programs read, and whose values are this run's.

        Nothing that differs between a run and the same one that was moved or interrupted: folders are numbered, and the date
        is that of the day.
        """
        plan, config = self.plan, self.plan.config
        schedule, objective, rate = config.schedule, plan.config.objective, config.optimizer.lr
        of_encoders = rate if config.optimizer.text_encoder_lr is None else config.optimizer.text_encoder_lr
        warmup = optim.steps_of(schedule.warmup, self.progress.total_steps)
        rates: tuple[set, set] = set(), set()  # of the denoiser, of the encoders
        for target in plan.model.targets:
            encodes = target.component != plan.family.denoiser
            rates[encodes].add(target.lr if target.lr is not None else (of_encoders if encodes else rate))
        began = datetime.fromisoformat(self.progress.started).replace(hour=0, minute=0, second=0, microsecond=0)
        counts = Counter(example.bucket for example in plan.examples for _ in range(example.photo.repeats))
        buckets = {
            str(index): {"resolution": list(bucket), "count": counts[bucket]} for index, bucket in enumerate(sorted(counts))
        }
        folders: tuple[dict, dict] = {}, {}
        for photo in plan.photos:
            entry = {"n_repeats": photo.repeats, "img_count": 0}
            entry = folders[photo.source.regularisation].setdefault(f"source {photo.source.index}", entry)
            entry["img_count"] += 1
            if entry.get("n_repeats") != photo.repeats:
                entry.pop("n_repeats", None)
        entries = {
            "training_started_at": began.timestamp(),
            "max_train_steps": plan.max_steps,
            "num_epochs": plan.epoch_of(plan.max_steps),
            "num_reg_images": sum(photo.repeats for photo in plan.photos if photo.source.regularisation),
            "batch_size_per_device": config.data.batch_size,
            "total_batch_size": config.data.batch_size * config.step.accumulation * plan.processes,
            "optimizer": config.optimizer.name,
            "unet_lr": _one(rates[0]),
            "text_encoder_lr": _one(rates[1]),
            "lr_scheduler": "constant_with_warmup" if schedule.name == "constant" and warmup else schedule.name,
            "lr_warmup_steps": warmup,
            "mixed_precision": {"fp32": "no"}.get(config.precision.compute, config.precision.compute),
            "max_grad_norm": config.step.max_grad_norm,
            "caption_dropout_rate": _one({photo.source.caption_dropout for photo in plan.photos}),
            "noise_offset": objective.noise_offset or None,
            "min_snr_gamma": objective.min_snr_gamma if objective.weighting == "min_snr" else None,
            "enable_bucket": True,
            "bucket_info": json.dumps({"buckets": buckets}),
            "dataset_dirs": json.dumps(folders[False]),
            "reg_dataset_dirs": json.dumps(folders[True]),
        }
        return {f"ss_{key}": str(value) for key, value in entries.items() if value is not SEVERAL}

    def state_dict(self) -> Mapping[str, Any]:
        """The origin, for whoever makes adapter files of the checkpoint. about: of its files. family, configs: of the
        model, the components that are adapted. alphas: of every adapted layer by full name, in the model's order."""
        plan = self.plan
        return {
            "about": asdict(self.about()),
            "family": plan.family.name,
            "configs": {name: plan.model.source.config(name) for name in plan.model.adapted},
            "alphas": [[name, target.alpha] for name, target in self.adapter.targets.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of it decides what the following steps do."""

"""The origin of an adapter file, for its header. It is a piece of the checkpoint, so that any checkpoint can be exported."""

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
from trainer.plan.run_plan import RunPlan
from trainer.resume.initial_adapter import Start

SEVERAL = object()  # the values differ, and kohya's entry has room for one
COUNTED = ("photos", "micro-batches in an update")  # kinds of changes on resume whose text ("KIND: ...") is only numbers


def _public(change: Mapping[str, Any]) -> dict[str, Any]:
    """A change on resume without what may be private (names of photos, values of keys): its kinds, and counts."""
    kinds = [line if (kind := line.partition(": ")[0]) in COUNTED else kind for line in change["what"]]
    return {"step": change["step"], "epoch": change["epoch"], "what": kinds}


def _single(values: set) -> Any:
    """The only value; None for an empty set, as kohya writes it."""
    return next(iter(values), None) if len(values) < 2 else SEVERAL


@dataclass(frozen=True)
class Origin:
    """The origin of a run's adapter. made_for: the weights that a DoRA's files are made for (norms.made_for)."""

    plan: RunPlan
    progress: Progress
    adapter: Adapter
    made_for: str
    start: Start

    # Cached: every checkpoint reads it, and there may be many photos.
    @cached_property
    def _triggers(self) -> str:
        return ", ".join(captions.triggers(self.plan.data.examples))

    def about(self) -> About:
        """The origin of adapter files of the current step."""
        plan, config = self.plan, self.plan.config
        sizes = {resolution for photo in plan.data.photos for resolution in photo.source.resolutions}
        return About(
            name=config.run.name,
            started=self.progress.started,
            step=self.progress.step,
            epoch=plan.length.epoch_of(self.progress.step),
            learning_rate=config.optimizer.lr,
            train_images=sum(photo.repeats for photo in plan.data.photos if not photo.source.regularisation),
            resolution=", ".join(f"{size}x{size}" for size in sorted(sizes)),
            trigger_phrase=config.export.trigger_phrase or self._triggers,
            seed=config.run.seed,
            dora_base=self.made_for,
            entries=self._entries(),
        )

    def _entries(self) -> dict[str, str]:
        """Header entries: the family's, kohya's, licence, starting weights, and changes on resume."""
        plan, family, changes = self.plan, self.plan.model.family, self.progress.changes
        prediction = getattr(plan.model.objective, "prediction", "velocity")
        config = plan.model.source.config(family.denoiser) | {"_variant": plan.model.source.variant.name}
        entries = {**family.adapters.metadata(config, prediction), **self._training}
        if plan.config.export.license:
            entries["modelspec.license"] = plan.config.export.license
        if lineage := self.start.lineage():
            entries["started_from"] = json.dumps(lineage, sort_keys=True)
        if changes:
            entries["changed_in_mid_run"] = json.dumps([_public(change) for change in changes], sort_keys=True)
        return entries

    @cached_property
    def _training(self) -> dict[str, str]:
        """The entries of kohya's trainer that people and programs read, with this run's values. Folders are numbered and the
        start is rounded to its day, so that a run that was moved or interrupted has the same."""
        plan, config = self.plan, self.plan.config
        schedule, objective, default_lr = config.schedule, config.objective, config.optimizer.lr
        encoder_lr = default_lr if config.optimizer.text_encoder_lr is None else config.optimizer.text_encoder_lr
        warmup = optim.steps_of(schedule.warmup, self.progress.total_steps)
        rates: tuple[set, set] = set(), set()  # of the denoiser, of the encoders
        for target in plan.model.targets:
            is_encoder = target.component != plan.model.family.denoiser
            rates[is_encoder].add(target.lr if target.lr is not None else (encoder_lr if is_encoder else default_lr))
        day = datetime.fromisoformat(self.progress.started).replace(hour=0, minute=0, second=0, microsecond=0)
        counts = Counter(example.bucket for example in plan.data.examples for _ in range(example.photo.repeats))
        buckets = {
            str(index): {"resolution": list(bucket), "count": counts[bucket]} for index, bucket in enumerate(sorted(counts))
        }
        folders: tuple[dict, dict] = {}, {}
        for photo in plan.data.photos:
            entry = {"n_repeats": photo.repeats, "img_count": 0}
            entry = folders[photo.source.regularisation].setdefault(f"source {photo.source.index}", entry)
            entry["img_count"] += 1
            if entry.get("n_repeats") != photo.repeats:
                entry.pop("n_repeats", None)
        entries = {
            "training_started_at": day.timestamp(),
            "max_train_steps": plan.length.max_steps,
            "num_epochs": plan.length.epoch_of(plan.length.max_steps),
            "num_reg_images": sum(photo.repeats for photo in plan.data.photos if photo.source.regularisation),
            "batch_size_per_device": config.data.batch_size,
            "total_batch_size": config.data.batch_size * config.step.accumulation * plan.length.processes,
            "optimizer": config.optimizer.name,
            "unet_lr": _single(rates[0]),
            "text_encoder_lr": _single(rates[1]),
            "lr_scheduler": "constant_with_warmup" if schedule.name == "constant" and warmup else schedule.name,
            "lr_warmup_steps": warmup,
            "mixed_precision": {"fp32": "no"}.get(config.precision.compute, config.precision.compute),
            "max_grad_norm": config.step.max_grad_norm,
            "caption_dropout_rate": _single({photo.source.caption_dropout for photo in plan.data.photos}),
            "noise_offset": objective.noise_offset or None,
            "min_snr_gamma": objective.min_snr_gamma if objective.weighting == "min_snr" else None,
            "enable_bucket": True,
            "bucket_info": json.dumps({"buckets": buckets}),
            "dataset_dirs": json.dumps(folders[False]),
            "reg_dataset_dirs": json.dumps(folders[True]),
        }
        tags = {"captions": dict(sorted(captions.frequency(plan.data.examples).items()))}
        texts = {f"ss_{key}": str(value) for key, value in entries.items() if value is not SEVERAL}
        return texts | {"ss_tag_frequency": json.dumps(tags, ensure_ascii=False)}

    def state_dict(self) -> Mapping[str, Any]:
        """The origin, to export adapter files from the checkpoint. about: About's fields. family, configs: of the model's
        adapted components. alphas: [full layer name, alpha] pairs in the model's order."""
        plan = self.plan
        return {
            "about": asdict(self.about()),
            "family": plan.model.family.name,
            "configs": {name: plan.model.source.config(name) for name in plan.model.adapted},
            "alphas": [[name, target.alpha] for name, target in self.adapter.targets.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: later steps do not depend on the origin, and a resumed run computes it again."""

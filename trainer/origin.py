"""What an adapter file says of the run it comes from, as a piece of the checkpoint: so any checkpoint gives its files.

Nothing is pinned by it and nothing restored from it: a run that goes on makes it anew.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trainer.adapters import Adapter
from trainer.adapters.export import About
from trainer.checkpoint.state import Progress
from trainer.data import captions
from trainer.plan import Plan
from trainer.start import Start


@dataclass(frozen=True)
class Origin:
    """made_for: which weights a DoRA's files are made for (norms.made_for). start: what the run started from."""

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
        """As of the present step."""
        plan, config, family = self.plan, self.plan.config, self.plan.family
        sizes = {resolution for photo in plan.photos for resolution in photo.source.resolutions}
        prediction = getattr(plan.objective, "prediction", "velocity")
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
            family=family.metadata(plan.source.config(family.denoiser), prediction),
        )

    def state_dict(self) -> Mapping[str, Any]:
        """about: of its files. family, configs: of the model, the components that are adapted. alphas: of every adapted layer
        by full name, in the model's order."""
        plan = self.plan
        return {
            "about": asdict(self.about()),
            "family": plan.family.name,
            "configs": {name: plan.source.config(name) for name in plan.adapted},
            "alphas": [[name, target.alpha] for name, target in self.adapter.targets.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of it decides what the following steps do."""

"""The held-out loss of an adapter file, as a run measures and logs it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.config import Config
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.run.run import prepared


def check_held_out(config: Config) -> None:
    """Raises UserError where the config holds no photos out."""
    if not config.data.held_out:
        raise UserError("data.held_out = 0 in the config: no photos are held out, and their loss is what is asked for")


def held_out_loss(config: Config, file: Path, *, rank: int, dora: bool) -> dict[str, Any]:
    """The fields of the log, of the model and the held-out photos of a run's config, with the adapter of `file` in it.

    rank, dora: of the file. Writes nothing but caches. Raises UserError where the config holds no photos out, or the file has
    layers that its run does not adapt.
    """
    check_held_out(config)
    tree = configs.tree(config)
    with TemporaryDirectory(prefix="measured-") as elsewhere:
        tree["run"] |= {"output_dir": str(Path(elsewhere) / "run"), "deterministic": False}
        tree["data"].update(cache="memory", cache_dir=elsewhere)
        tree["checkpoint"].pop("mirror", None)
        tree["logging"] = {"tensorboard": False}
        tree["validation"] |= {"prompts": [], "samples": [], "every_steps": 0, "loss_every_steps": 1}
        own = {"type": "dora" if dora else "lora", "rank": rank, "init_from": str(file.absolute()), "init_resize": True}
        tree["adapter"] = {key: value for key, value in tree["adapter"].items() if key != "alpha"} | own
        for rule in tree["adapter"].get("rules", ()):
            rule.pop("alpha", None)
            rule.pop("rank", None)
        with prepared(configs.parse(tree), resume_from=None) as (run, _):
            return HeldOutLoss.of(run.plan, run.components, run.reader, run.state.evaluating).measure()

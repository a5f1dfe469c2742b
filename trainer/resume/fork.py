"""A fork: a new run that goes on from a checkpoint of another one, with something changed and every draw the same."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout, folder_name, step_of
from trainer.checkpoint import store
from trainer.checkpoint.state import Saved
from trainer.config import Config
from trainer.resume.allowed_changes import Allowance, never
from trainer.resume.pins import MAY_CHANGE, PLACES

DRAWS = ("data", "run.seed")  # keys and tables that the draws, or the photos, follow from


def fork(checkpoint: str, overrides: Sequence[str]) -> tuple[Config, Allowance]:
    """(the config of the new run, what may differ from the checkpoint): that of the checkpoint with `table.key=VALUE`
    overrides.

    Without run.output_dir among them its folder is that of the old run with "-from-STEP" behind its name. Raises UserError
    for a folder that is no checkpoint, a key that a fork cannot change, and an output folder that holds a run.
    """
    folder, _ = store.find(Path(), checkpoint)
    if folder is None or checkpoint in ("auto", "latest"):
        example = Layout(Path("RUN")).checkpoints / folder_name(500)
        raise UserError(f"--fork_from {checkpoint}: give a checkpoint's folder, for example {example}")
    tree = dict(Saved.whatever(folder).state("config"))
    old = Layout(Path(tree["run"]["output_dir"]))
    tree["run"].pop("stop_after", None)
    tree["run"]["output_dir"] = f"{old.root}-from-{step_of(folder.name) or folder.name}"
    if tree["data"].get("cache_dir") is None and old.cache.is_dir():
        tree["data"]["cache_dir"] = str(old.cache)
    keys = configs.override(tree, overrides)
    for key in keys:
        _refuse(key)
    config = configs.parse(tree)
    new = Layout(Path(config.run.output_dir))
    if new.root.exists() and (not new.root.is_dir() or {*new.root.iterdir()} - {new.report, new.cache, new.lock}):
        raise UserError(
            f"--fork_from {checkpoint}: run.output_dir = {str(new.root)!r} is there already; go on with that run by --config "
            f"{new.config} --resume_from auto, or choose another folder with --set run.output_dir=FOLDER"
        )
    return config, Allowance(tuple(key for key in keys if not _free(key)), str(folder))


def _free(key: str) -> bool:
    """Whether any run may go on with another value of the key."""
    return any(fnmatchcase(key, pattern) for pattern in (*MAY_CHANGE, *PLACES))


def _refuse(key: str) -> None:
    if _free(key):
        return
    if reason := never(key):
        raise UserError(f"--fork_from: {key} cannot change in mid-run: {reason}; leave it out, or start a new run")
    if any(key == shared or key.startswith(f"{shared}.") for shared in DRAWS):
        raise UserError(
            f"--fork_from: {key}: a fork keeps photos and draws, so that it can be compared with its original; leave "
            "it out, or go on with other photos or draws by --resume_from CHECKPOINT --allow data"
        )

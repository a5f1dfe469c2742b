"""A fork: a new run that continues from another run's checkpoint with changed settings and the same random draws."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout, folder_name, step_of
from trainer.checkpoint import store
from trainer.checkpoint.state import Saved
from trainer.config import Config
from trainer.resume.allowed_changes import Allowance, objection
from trainer.resume.pins import MAY_CHANGE, PLACES

DRAWS = ("data", "run.seed")  # keys and tables that decide draws or photos


def fork(checkpoint: str, overrides: Sequence[str]) -> tuple[Config, Allowance]:
    """(config of the new run, allowed differences from the checkpoint). The config is the checkpoint's with
    `table.key=VALUE` overrides; the default run.output_dir has "-from-STEP" behind the old name. Raises UserError for a
    folder that is no checkpoint, a key that a fork cannot change, and an output folder that holds a run."""
    if checkpoint in ("auto", "latest"):
        example = Layout(Path("RUN")).checkpoints / folder_name(500)
        raise UserError(f"--fork_from {checkpoint}: give a checkpoint's folder, for example {example}")
    folder = store.checkpoint_at(checkpoint, option="--fork_from")
    tree = dict(Saved(folder, census=None).state("config"))
    old = Layout(Path(tree["run"]["output_dir"]))
    tree["run"].pop("stop_after", None)
    tree["run"]["output_dir"] = f"{old.root}-from-{step_of(folder.name) or folder.name}"
    if tree["data"].get("cache_dir") is None and old.cache.is_dir():
        tree["data"]["cache_dir"] = str(old.cache)
    before = configs.flatten(tree)
    configs.override(tree, overrides)
    after = configs.flatten(tree)
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    keys = [key for key in changed if not any(fnmatchcase(key, free) for free in (*MAY_CHANGE, *PLACES))]
    for key in keys:
        _refuse(key)
    config = configs.parse(tree)
    new = Layout(Path(config.run.output_dir))
    if _holds_a_run(new):
        remedy = f"go on with that run by --config {new.config} --resume_from auto, or choose another folder with --set"
        place = f"run.output_dir = {str(new.root)!r} is there already"
        raise UserError(f"--fork_from {checkpoint}: {place}; {remedy} run.output_dir=FOLDER")
    return config, Allowance(tuple(keys), str(folder))


def has_checkpoint(layout: Layout) -> bool:
    """Whether the run has a checkpoint, from which it can be resumed."""
    return bool(store.steps(layout.checkpoints) or store.unnamed(layout.checkpoints))


def _holds_a_run(layout: Layout) -> bool:
    """Whether a folder holds more than a killed start of a fork leaves before its first checkpoint."""
    if not layout.root.is_dir():
        return layout.root.exists()
    expected = {layout.report, layout.cache, layout.lock}
    if layout.original.exists():
        expected |= {layout.original, layout.metrics, layout.samples, layout.phases, layout.config, layout.tensorboard}
        expected |= set() if has_checkpoint(layout) else {layout.checkpoints}
    return any(path not in expected and not path.name.endswith(".tmp") for path in layout.root.iterdir())


def _refuse(key: str) -> None:
    name = configs.whole(key)
    if reason := objection(key):
        raise UserError(f"--fork_from: {name} cannot change in mid-run: {reason}; leave it out, or start a new run")
    if any(key == table or key.startswith(f"{table}.") for table in DRAWS):
        remedy = "leave it out, or go on with other photos or draws by --resume_from CHECKPOINT --allow data"
        reason = "a fork keeps photos and draws, so that it can be compared with its original"
        raise UserError(f"--fork_from: {name}: {reason}; {remedy}")

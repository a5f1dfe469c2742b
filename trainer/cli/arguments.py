"""The arguments of train.py. What it does not take is answered with what to write."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

# What people type for an option of ours, without the hyphens.
OTHERS = {
    "config_file": "--config", "c": "--config", "toml": "--config", "dataset_config": "--config", "resume":
    "--resume_from auto", "resume_from_checkpoint": "--resume_from auto", "dry_run": "--plan", "estimate": "--plan",
    "override": "--set",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake as every other mistake is told."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and exit with status 2."""
        message = re.sub("^argument (.*): expected .*", r"\1 needs a value after it", message)
        print(f"error: {message}\n       python {self.prog} --help lists the options", file=sys.stderr)
        raise SystemExit(2)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options by name. arguments: None takes those of this process. Exits with status 2 after a
    mistake."""
    parser = Parser(
        prog="train.py", description="Fine-tune a LoRA or DoRA adapter for SDXL, Flux or FLUX.2.", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file, or the bare name of one in configs/")
    parser.add_argument(
        "--resume_from", metavar="auto|latest|DIR", help="go on from a checkpoint; auto starts fresh where none exists"
    )
    parser.add_argument(
        "--allow", metavar="KEY[,KEY]|data",
        help="with --resume_from: go on with other values of these keys or tables; data: with other photos",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a config key with a TOML value (a bare word is a string)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", action="store_true", help="print what the run would do and whether it fits, and train nothing"
    )
    parser.add_argument(
        "--plan_memory", metavar="SIZE", help='as --plan, for an accelerator of that memory ("12GiB") that need not be here'
    )
    parser.add_argument(
        "--new", metavar="PHOTOS", help="write a first config for a folder of photos, and show its data and its plan"
    )
    parser.add_argument(
        "--fork_from", metavar="CHECKPOINT",
        help="a new run that goes on from a checkpoint with what --set changes, and every draw the same",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar="FILE", help="train variants of a config with the same seeds, and judge them in pairs"
    )
    parser.add_argument("--model", metavar="PATH", help="with --new: a diffusers folder, a .safetensors file or a hub id")
    chosen, others = parser.parse_known_args(arguments)
    if others:
        parser.error(_unknown(others, parser))
    if chosen.new is not None:
        for option, given in (("config", chosen.config), ("resume_from", chosen.resume_from)):
            if given:
                parser.error(f"--new and --{option} do not go together; change the config that --new writes")
    elif chosen.compare is not None:
        options = {"config": "config", "resume_from": "resume_from", "overrides": "set", "plan_memory": "plan_memory"}
        for name, option in options.items():
            if getattr(chosen, name):
                parser.error(f"--compare and --{option} do not go together; change the file that --compare names")
    elif chosen.fork_from is not None:
        for option, given in (("config", chosen.config), ("resume_from", chosen.resume_from), ("allow", chosen.allow)):
            if given:
                parser.error(f"--fork_from and --{option} do not go together; what --set changes is allowed")
    elif chosen.model is not None:
        parser.error("--model belongs to --new; write --set model.path=" + chosen.model)
    elif chosen.config is None:
        parser.error("give --config FILE (configs/ has some), --compare FILE, or --new PHOTOS to begin with")
    return chosen


def again(arguments: Sequence[str]) -> str:
    """The command line that goes on with a run which one with these arguments has begun."""
    kept, skip = [], False
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if skip or name in ("--resume_from", "--allow"):
            skip = not skip and not separator
        elif not argument.removeprefix("--set=").startswith("run.stop_after="):  # it would stop there again
            kept.append(argument)
    empty = [one == "--set" and after.startswith("--") for one, after in pairwise([*kept, "--"])]
    kept = [argument for argument, nothing in zip(kept, empty, strict=True) if not nothing]
    whole = any(argument.partition("=")[0] == "--compare" for argument in kept)  # its runs go on by themselves
    return shlex.join(["python", "train.py", *kept, *([] if whole else ["--resume_from", "auto"])])


def _unknown(others: Sequence[str], parser: Parser) -> str:
    """Of the first argument that is none."""
    first, value = others[0], next(iter(others[1:]), "VALUE")
    if not first.startswith("-"):
        if first.endswith(".toml"):
            return f"{first} stands alone; write --config {first}"
        return f"{first} stands alone; write --set {first}" if "=" in first else f"{first} belongs to no option"
    from trainer import config
    from trainer.base import patterns

    name, separator, given = first.partition("=")
    if not separator:
        given = "VALUE" if value.startswith("-") else value
    word = name.lstrip("-").replace("-", "_")
    ours = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    meant = OTHERS.get(word) or patterns.near(f"--{word}", ours, cutoff=0.8)
    key = None if meant else config.near_miss(word)
    if meant is None and key is None:
        return f"{name} is no option"
    if key is not None and " " not in key:
        return f"{name} is no option but a key of the config; write --set {key}={given}"
    return f"{name} is no option; " + (key or f"write {meant}")

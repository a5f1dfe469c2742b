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
    """The command line's options by name. arguments: None takes those of this process. A mistake exits with status 2."""
    parser = Parser(
        prog="train.py",
        description="Fine-tune a LoRA, DoRA or LoKr adapter for SDXL, Flux, FLUX.2, FLUX.3 or Z-Image.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", nargs="+", action="extend",
        help="a TOML file, or the bare name of one in configs/; several are run one after the other",
    )  # fmt: skip
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
    parser.add_argument("--verify", action="store_true", help="read every photo, whatever an earlier start knows of it")
    parser.add_argument("--model", metavar="PATH", help="with --new: a diffusers folder, a .safetensors file or a hub id")
    options, others = parser.parse_known_args(arguments)
    # Of several configs all are called so; a first one may have any name.
    if others := others or [file for file in (options.config or [])[1:] if not file.endswith(".toml")]:
        parser.error(_unknown(others, parser))
    _refuse_mixed(options, parser)
    return options


# What begins a run: of each the options that do not go with it, and what to do in place of them.
BESIDE = {
    "new": ("compare fork_from config resume_from allow verify", "change the config that --new writes"),
    "compare": ("fork_from config resume_from allow set plan_memory model verify", "change the file that --compare names"),
    "fork_from": ("config resume_from allow model", "what --set changes is allowed"),
}


def _refuse_mixed(options: argparse.Namespace, parser: Parser) -> None:
    given = vars(options) | {"set": options.overrides}
    begins = next((name for name in BESIDE if given[name] is not None), None)
    if begins is None and options.model is not None:
        parser.error("--model belongs to --new; write --set model.path=" + options.model)
    if begins is None and options.config is None:
        parser.error("give --config FILE (configs/ has some), --compare FILE, or --new PHOTOS to begin with")
    others, remedy = BESIDE.get(begins or "", ("", ""))
    for name in others.split():
        if given[name]:
            parser.error(f"--{begins} and --{name} do not go together; {remedy}")


def without_config(arguments: Sequence[str]) -> list[str]:
    """The arguments but for --config and its files."""
    rest, inside = [], False
    for argument in arguments:
        inside = argument.partition("=")[0] == "--config" or (inside and not argument.startswith("--"))
        rest += [] if inside else [argument]
    return rest


def again(arguments: Sequence[str]) -> str:
    """The command line that goes on with a run which one with these arguments has begun."""
    rest, skip = [], False
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if skip or name in ("--resume_from", "--allow"):
            skip = not skip and not separator
        elif not argument.removeprefix("--set=").startswith("run.stop_after="):  # it would stop there again
            rest.append(argument)
    empty = [one == "--set" and after.startswith("--") for one, after in pairwise([*rest, "--"])]
    rest = [argument for argument, nothing in zip(rest, empty, strict=True) if not nothing]
    whole = any(argument.partition("=")[0] == "--compare" for argument in rest)  # its runs go on by themselves
    return shlex.join(["python", "train.py", *rest, *([] if whole else ["--resume_from", "auto"])])


def _unknown(others: Sequence[str], parser: Parser) -> str:
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

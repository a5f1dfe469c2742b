"""The arguments of train.py. An unknown argument gets a remedy."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

# Names of other programs, without hyphens -> our options.
OTHERS = {
    "config_file": "--config", "c": "--config", "toml": "--config", "dataset_config": "--config", "resume":
    "--resume_from auto", "resume_from_checkpoint": "--resume_from auto", "dry_run": "--plan", "estimate": "--plan",
    "override": "--set",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others of the program."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with status 2."""
        message = re.sub("^argument (.*): expected .*", r"\1 needs a value after it", message)
        print(f"error: {message}\n       python {self.prog} --help lists the options", file=sys.stderr)
        raise SystemExit(2)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options by name. arguments: None: this process's. Exits with status 2 on an error."""
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
    options, unknown = parser.parse_known_args(arguments)
    # The first config may have any name, further ones must end in .toml.
    if unknown := unknown or [file for file in (options.config or [])[1:] if not file.endswith(".toml")]:
        parser.error(_unknown(unknown, parser))
    _refuse_mixed(options, parser)
    return options


# Option that starts a run -> (options that exclude it, remedy).
EXCLUDED = {
    "new": ("compare fork_from config resume_from allow verify", "change the config that --new writes"),
    "compare": ("fork_from config resume_from allow set plan_memory model verify", "change the file that --compare names"),
    "fork_from": ("config resume_from allow model", "what --set changes is allowed"),
}


def _refuse_mixed(options: argparse.Namespace, parser: Parser) -> None:
    values = vars(options) | {"set": options.overrides}
    start = next((name for name in EXCLUDED if values[name] is not None), "")
    if not start and options.model is not None:
        parser.error("--model belongs to --new; write --set model.path=" + options.model)
    if not start and options.config is None:
        parser.error("give --config FILE (configs/ has some), --compare FILE, or --new PHOTOS to begin with")
    excluded, remedy = EXCLUDED.get(start, ("", ""))
    for name in excluded.split():
        if values[name]:
            parser.error(f"--{start} and --{name} do not go together; {remedy}")


def without_config(arguments: Sequence[str]) -> list[str]:
    """The arguments except --config and its files."""
    rest, in_config = [], False
    for argument in arguments:
        in_config = argument.partition("=")[0] == "--config" or (in_config and not argument.startswith("--"))
        rest += [] if in_config else [argument]
    return rest


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that resumes a run that was started with these arguments."""
    rest, skip = [], False
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if skip or name in ("--resume_from", "--allow"):
            skip = not skip and not separator
        elif not argument.removeprefix("--set=").startswith("run.stop_after="):  # it would stop there again
            rest.append(argument)
    # A --set without a value is what remains of --set run.stop_after=N.
    rest = [one for one, following in pairwise([*rest, "--"]) if not (one == "--set" and following.startswith("--"))]
    compares = any(argument.partition("=")[0] == "--compare" for argument in rest)  # its runs resume by themselves
    return shlex.join(["python", "train.py", *rest, *([] if compares else ["--resume_from", "auto"])])


def _unknown(arguments: Sequence[str], parser: Parser) -> str:
    first, value = arguments[0], next(iter(arguments[1:]), "VALUE")
    if not first.startswith("-"):
        if first.endswith(".toml"):
            return f"{first} stands alone; write --config {first}"
        return f"{first} stands alone; write --set {first}" if "=" in first else f"{first} belongs to no option"
    from trainer import config
    from trainer.base import patterns

    name, separator, text = first.partition("=")
    if not separator:
        text = "VALUE" if value.startswith("-") else value
    word = name.lstrip("-").replace("-", "_")
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    if option := OTHERS.get(word) or patterns.near(f"--{word}", options, cutoff=0.8):
        return f"{name} is no option; write {option}"
    key = config.near_miss(word)
    if key is None:
        return f"{name} is no option"
    return f"{name} is no option" + (f"; {key}" if " " in key else f" but a key of the config; write --set {key}={text}")

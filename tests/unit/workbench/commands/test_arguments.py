"""train.py's arguments: what it does not take is answered with what to write."""

from __future__ import annotations

import shlex

import pytest

from workbench.commands import arguments

MISTAKES = [
    ([], "give --config FILE (configs/ has some), --compare FILE, or --new PHOTOS to begin with"),
    (["my.toml"], "my.toml stands alone; write --config my.toml"),
    (["--config"], "--config needs a value after it"),
    (["--config", "c", "--resume_from"], "--resume_from needs a value after it"),
    (["--config", "c", "run.seed=3"], "run.seed=3 stands alone; write --set run.seed=3"),
    (["--config", "c", "photos"], "photos belongs to no option"),
    (["--config", "c", "--max_steps", "100"],
     "--max_steps is no option but a key of the config; write --set run.max_steps=100"),
    (["--config", "c", "--learning_rate=1e-4"],
     "--learning_rate is no option but a key of the config; write --set optimizer.lr=1e-4"),
    (["--config", "c", "--network-dim", "8"],
     "--network-dim is no option but a key of the config; write --set adapter.rank=8"),
    (["--config", "c", "--gradient_checkpointing", "--plan"],
     "--gradient_checkpointing is no option but a key of the config; write --set memory.gradient_checkpointing=VALUE"),
    (["--config", "c", "--use_dora"], '--use_dora is no option; write type = "dora" in [adapter]'),
    (["--config", "c", "--resume-from", "auto"], "--resume-from is no option; write --resume_from"),
    (["--config", "c", "--resume"], "--resume is no option; write --resume_from auto"),
    (["--config", "c", "--dry-run"], "--dry-run is no option; write --plan"),
    (["--confg", "c"], "--confg is no option; write --config"),
    (["--config", "c", "--new", "photos"], "--new and --config do not go together; change the config that --new writes"),
    (["--compare", "c", "--fork_from", "d"], "--compare and --fork_from do not go together; change the file that --compare "
     "names"),
    (["--compare", "c", "--set", "a=1"], "--compare and --set do not go together; change the file that --compare names"),
    (["--new", "p", "--compare", "c"], "--new and --compare do not go together; change the config that --new writes"),
    (["--fork_from", "c", "--model", "m"], "--fork_from and --model do not go together; what --set changes is allowed"),
    (["--config", "c", "--model", "m"], "--model belongs to --new; write --set model.path=m"),
    (["--config", "c", "--foo"], "--foo is no option"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_told_with_what_to_write(capsys, given: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {said}", "       python train.py --help lists the options"]


def test_what_it_takes_goes_through() -> None:
    chosen = arguments.parse(
        ["--config", "c", "--set", "a.b=1", "c.d=2", "--set", "e.f=3", "--plan", "--resume_from", "auto"]
    )
    assert chosen.overrides == [["a.b=1", "c.d=2"], ["e.f=3"]] and chosen.plan and chosen.resume_from == "auto"


@pytest.mark.parametrize(
    "typed, command",
    [
        ("--config run.toml", "--config run.toml"),
        ("--config run.toml --resume_from auto", "--config run.toml"),
        ("--resume_from=latest --config run.toml --allow data", "--config run.toml"),
        ("--config run.toml --set run.stop_after=2", "--config run.toml"),
        ("--config run.toml --set run.stop_after=2 run.seed=1", "--config run.toml --set run.seed=1"),
        ("--set run.seed=1 --set=run.stop_after=2 --config run.toml", "--set run.seed=1 --config run.toml"),
        ("--set run.stop_after=2 --config 'my run.toml'", "--config 'my run.toml'"),
    ],
)
def test_the_command_line_that_goes_on_is_told(typed: str, command: str) -> None:
    assert arguments.resume_command(shlex.split(typed)) == f"python train.py {command} --resume_from auto"

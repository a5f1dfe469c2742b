"""What a run says is right at any width and without a terminal, changes no byte, and whoever reads it may leave."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, Workbench, metrics_of
from tests.terminal import in_terminal
from trainer.checkpoint import store
from workbench.commands import main as cli

DURATION = r"(\d\.\d s|\d\d s|\d+ min \d+ s|\d+ h \d+ min)"  # on a slow machine, too
# Of the training's line, in order. None is ever cut.
FIELDS = (
    r"step \d+/12", r"epoch \d+", r"loss \d\.\d{4}", r"held-out \d\.\d{4}", r"lr \d\.\d\de-04", r"\d+(\.\d+)? images/s",
    r"memory \d\.\d\d GiB", rf"{DURATION} left",
    r"last (checkpoint step \d+|samples step \d+|held-out loss \d\.\d{4} \((best, )?step \d+\))",
)  # fmt: skip
TRAINING = re.compile(FIELDS[0] + "".join(f"(, {field})?" for field in FIELDS[1:]))
AMOUNT = r"(\d+\.\d\d|\d+)( of (\d+\.\d\d|\d+))? [A-Za-z]+"
RATE = r"(\d+\.\d\d GB/s|\d+\.\d [a-z]+/s|\d+\.\d s a [a-z]+)"
OTHERS = re.compile(rf"[^:,]+: ({DURATION} so far|{AMOUNT}(, {RATE})?(, {DURATION} left)?)(, step \d+/12)?")

SHOWN = {
    "run__max_steps": 12, "checkpoint__every_steps": 4, "validation": {
        "every_steps": 6, "prompts": ["a photo of sks plush bear"], "steps": 2, "loss_every_steps": 6,
    },
    "data__held_out": 1, "logging": {"tensorboard": True, "every_seconds": 1},
}  # fmt: skip
NOTHING = {
    "run__max_steps": 12, "checkpoint__every_steps": 0, "data__held_out": 1, "logging": {"tensorboard": False},
}  # fmt: skip


# A machine may be so fast that no phase lasts long enough to be shown.
EAGER = """
import runpy, sys
from trainer.base import progress as phases
phases.LONG_SECONDS = phases.LIVE_AFTER = 0.0
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def eager(arguments: list[str]) -> list[str]:
    """The same command, of which each phase is shown, however short it is."""
    return [arguments[0], "-c", EAGER, *arguments[1:]]


def wait_for_a_step(output: Path) -> None:
    log = output / "metrics.jsonl"
    until = time.monotonic() + 100
    while not (log.exists() and log.read_bytes().count(b"\n")):
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.02)


def check_end(lines: list[str], output: Path, columns: int) -> None:
    """The verdict, then the files to load, then the tables."""
    text = "\n".join(lines)
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(("verdict: ", "warning: "))),
        lines.index(f'    pipe.load_lora_weights("{output}/adapters/bear.safetensors")'),
        next(i for i, line in enumerate(lines) if line.startswith("adapter (comfyui): copy this file into ")),
        lines.index(f"    {output}/adapters/bear_comfyui.safetensors"),
        lines.index(f"report: {output}/report.html"),
        lines.index("Did it take?"),
        lines.index("Effect"),
    ]
    assert places == sorted(places), text
    too_long = [line for line in lines if len(line) > columns and str(output) not in line]
    assert [line for line in too_long if " " in line.strip()] == []


@pytest.mark.parametrize("columns", [pytest.param(60, marks=pytest.mark.slow), pytest.param(140, marks=pytest.mark.proof)])
def test_a_terminal_has_one_live_line_with_whole_numbers_at_any_width(bench: Workbench, columns: int) -> None:
    arguments, output = command(bench, **SHOWN)
    screen = in_terminal(eager(arguments), columns)
    assert all(len(state) < columns for state in screen.seen)
    assert [state for state in screen.seen if not (TRAINING.fullmatch(state) or OTHERS.fullmatch(state))] == []
    fullest = max((state for state in screen.seen if state.startswith("step ")), key=lambda state: state.count(","))
    assert len(re.findall("|".join(f"(?:{field})" for field in FIELDS), fullest)) >= (4 if columns == 60 else 8)
    assert not any(line.startswith("step ") for line in screen.lines), "a live line stayed"
    check_end(screen.lines, output, columns)


@pytest.mark.slow
def test_what_is_shown_changes_no_byte_and_without_a_terminal_it_is_plain_lines(bench: Workbench) -> None:
    """Everything shown, as it is written into a file, against nothing shown that nobody reads."""
    arguments, shown = command(bench, **SHOWN, run__output_dir=str(bench.tmp / "shown"))
    said = subprocess.run(eager(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, cwd=ROOT).stdout
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", said), "a control character"
    lines = said.decode().splitlines()
    assert any(TRAINING.fullmatch(line) for line in lines)
    check_end(lines, shown, 160)
    (_, _, *arguments), hidden = command(bench, **NOTHING, run__output_dir=str(bench.tmp / "hidden"))
    assert cli.main(arguments) == 0
    for file in (
        *(f"checkpoints/step-00000012/{name}.safetensors" for name in ("adapter", "optimizer")),
        "adapters/bear.safetensors",
        "adapters/bear_comfyui.safetensors",
    ):
        assert (shown / file).read_bytes() == (hidden / file).read_bytes(), file


@pytest.mark.slow
def test_a_stopped_run_says_what_it_left_and_the_command_that_goes_on(bench: Workbench, capsys) -> None:
    (_, _, *arguments), output = command(bench, run__max_steps=4, checkpoint__every_steps=0)
    assert cli.main([*arguments, "--set", "run.stop_after=2"]) == 0
    said = capsys.readouterr().out.splitlines()
    stopped = said.index("stopped after step 2 as asked (run.stop_after), which is saved")
    assert said.index(f"    {output}/adapters/bear_comfyui.safetensors") > stopped
    assert said[-1] == f"go on: python train.py {' '.join(arguments)} --resume_from auto"


LOUD = """
import logging, sys, warnings
from trainer.runtime.libraries import quiet_libraries
quiet_libraries()
from tqdm import tqdm
from huggingface_hub.utils import tqdm as hub_tqdm
from transformers.utils import logging as transformers_logging
for bar in (tqdm, hub_tqdm, transformers_logging.tqdm):
    for _ in bar(range(3), desc="a library's bar"):
        pass
transformers_logging.get_logger("transformers.any").warning("could be faster")
warnings.warn("will go away", FutureWarning)
warnings.warn("the driver\\nis \\x1b[31mold", UserWarning)
logging.getLogger("urllib3").warning("retrying\\r\\n")
"""


@pytest.mark.slow
def test_what_libraries_say_is_plain_lines_without_their_bars(bench: Workbench) -> None:
    (bench.tmp / "loud.py").write_text(LOUD)
    quiet = ("PYTHONWARNINGS", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DIFFUSERS_VERBOSITY")
    environment = {name: value for name, value in os.environ.items() if name not in quiet} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(bench.tmp / "loud.py")], capture_output=True, text=True, env=environment)
    assert done.stdout == "" and done.returncode == 0
    assert done.stderr.splitlines() == ["warning: loud.py: the driver is \\x1b[31mold", "warning: urllib3: retrying"]


def command(bench: Workbench, **overrides) -> tuple[list[str], Path]:
    tree = bench.tree("flux", adapter__targets=["*attn.to_q"], data__batch_size=1, **overrides)
    return [sys.executable, str(ROOT / "train.py"), "--config", str(bench.write(tree))], Path(tree["run"]["output_dir"])


def objects(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    assert all(line["level"] in ("info", "warning", "error") and isinstance(line["message"], str) for line in lines)
    return lines


@pytest.mark.slow
def test_with_logging_json_each_line_is_an_object(bench: Workbench, capfd) -> None:
    """Of a run, also one that is stopped, of its plan, and of what ends it; the steps are those of the log. Nothing else
    stands on stderr than what ended it, and the acknowledgement of a signal."""
    arguments, output = command(bench, run__max_steps=3, logging__json=True, validation__prompts=["a bear"])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def ask(*more: str) -> tuple[int, list[dict], str]:
        capfd.readouterr()
        status, said = cli.main([*arguments[2:], *more]), capfd.readouterr()
        return status, objects(said.out), said.err

    done = subprocess.run(eager(arguments), capture_output=True, text=True, env=environment)
    status, lines, errors = done.returncode, objects(done.stdout), done.stderr
    steps = [{k: v for k, v in line.items() if k not in ("level", "message")} for line in lines if "step" in line]
    log = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert (status, errors) == (0, "") and steps == log and len(steps) == 3
    said = [line["message"] for line in lines]
    assert any(line["level"] == "warning" and "nothing was learned" in line["message"] for line in lines)
    assert any(text.startswith("loading transformer: ") for text in said) and any("\nEffect" in f"\n{text}" for text in said)
    assert len([text for text in said if text.startswith("step ")]) == 3, "each is told once"

    status, lines, errors = ask("--plan")
    assert (status, errors) == (0, "") and any("fits" in line["message"] for line in lines)

    status, lines, errors = ask()
    assert status == 2 and lines[-1]["level"] == "error" and "--resume_from auto" in lines[-1]["message"]
    assert errors == f"error: {lines[-1]['message']}\n"

    fault = "; from trainer.run import session; session.make_loop = lambda *_: 1 / 0"
    code = EAGER.replace("import runpy, sys", f"import runpy, sys{fault}")
    broken = [arguments[0], "-c", code, *arguments[1:], "--set", f"run.output_dir={output.parent / 'broken'}"]
    done = subprocess.run(broken, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" in done.stderr
    last = objects(done.stdout)[-1]
    assert (last["level"], last["message"]) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_run_with_129_and_a_checkpoint(bench: Workbench) -> None:
    """The hang-up came, and the next line to the closed terminal was an error: status 1, and no checkpoint."""
    arguments, output = command(bench, run__max_steps=100_000, checkpoint__background=False)
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # of a suite that nohup started it is ignored
        os.execve(sys.executable, arguments, os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    os.set_blocking(terminal, False)
    wait_for_a_step(output)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    (step,) = store.steps(output / "checkpoints")
    assert store.problem(output / "checkpoints" / store.folder_name(step)) is None
    assert metrics_of(output)[-1]["step"] == step > 0


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_any_more_stops_nothing(bench: Workbench) -> None:
    """As of `train.py | head` or a `tee` that was killed."""
    arguments, output = command(bench, run__max_steps=12, checkpoint__every_steps=4)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert len(metrics_of(output)) == 12
    files = sorted(path.name for path in (output / "adapters").glob("*.safetensors"))
    assert files == ["bear.safetensors", "bear_comfyui.safetensors"]
    assert (output / "report.html").exists()

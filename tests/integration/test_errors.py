"""Bad input: one clear message, exit status 2, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.harness import PHOTOS, Workbench
from trainer.base.tensorfile import TensorFile, write_tensors
from workbench.commands import main as cli
from workbench.commands import plan_command
from workbench.planning.estimate import STEP, Forecast, Stage


def refused(
    bench: Workbench, capsys, *expected: str, tree: dict | None = None, arguments: tuple[str, ...] = (), plan: bool = True
) -> None:
    """The command line on `tree` exits with 2, says all of `expected` in one message, and leaves no output.

    plan: so does --plan, in the same words. False: only the weights, or writing, are a reason to refuse.
    """
    tree = tree if tree is not None else bench.tree()
    out = Path(tree["run"]["output_dir"])

    def left() -> list[Path] | None:
        return sorted(p for p in out.rglob("*") if "cache" not in p.parts) if out.exists() else None

    before, config = left(), str(bench.write(tree))
    planned = cli.main(["--config", config, *arguments, "--plan"])
    told = capsys.readouterr().err
    assert before == left(), f"planning wrote: {left()}"
    status = cli.main(["--config", config, *arguments])
    captured = capsys.readouterr()
    if plan:
        assert (planned, told.partition("error: ")[2]) == (2, captured.err.partition("error: ")[2])
    else:
        assert planned == 0, told
    assert status == 2, captured.err
    assert captured.err.count("error:") == 1 and "Traceback" not in captured.err
    for part in expected:
        assert part in captured.err, captured.err
    assert before == left(), f"half-written: {left()}"


@pytest.fixture
def no_forecast(monkeypatch) -> None:
    """What a plan says of memory costs seconds and is tested in test_forecast.py."""
    step = Stage(f"{STEP} 64x64, batch 2", {"weights": 2**20})
    monkeypatch.setattr(plan_command, "forecast", lambda *_, **__: Forecast((step,), 0, 0))


def broken_model(bench: Workbench, change: Callable[[Path], None], family: str = "sdxl") -> dict:
    model = bench.tmp / "model"
    shutil.copytree(bench.models / family, model)
    change(model)
    return bench.tree(family, model__path=str(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run__sed", 3, ("unknown key run.sed", "did you mean run.seed")),
        ("adapter__rnak", 3, ("unknown key adapter.rnak", "did you mean adapter.rank")),
        ("adapter__kernels", "cuda", ("adapter.kernels = 'cuda'", "'triton'")),
        ("adapter__kernels", "triton", ("adapter.kernels = 'triton' needs a CUDA device", "this run is on cpu; use 'auto'")),
        ("step__graphs", True, ("step.graphs = true needs a CUDA device, this run is on cpu; leave it out",)),
        ("optimizer__lr", "fast", ("optimizer.lr = 'fast'", "number")),
        ("optimizer__name", "adamw_8bit", ("optimizer.name = 'adamw_8bit' is not known", "did you mean 'adamw8bit'?")),
        ("data__batch_size", 0, ("data.batch_size = 0", "greater than or equal to 1")),
        ("run__epochs", 3, ("exactly one of run.max_steps and run.epochs",)),
        ("model__family", "sdlx", ("model.family = 'sdlx'", "did you mean 'sdxl'")),
        ("model__components", {"unte": {"dtype": "bf16"}}, ("model.components.unte", "did you mean 'unet'")),
        ("model__components", {"unet": {"dtype": "fp9"}}, ("model.components.unet.dtype = 'fp9'",)),
        (
            "model__components", {"unet": {"dtype": "nf4", "backend": "quanto"}},
            ("model.components.unet.backend = 'quanto' has no dtype = 'nf4'", "use 'bitsandbytes'"),
        ),
        (
            "model__components", {"unet": {"backend": "quanto"}},
            ("model.components.unet.backend = 'quanto' has no dtype = 'bf16'", "use 'native'"),
        ),
        ("model__components", {"vae": {"dtype": "int8"}}, ("model.components.vae.dtype = 'int8'", "not quantised")),
        ("model__components", {"vae": {"dtype": "fp8_e4m3"}}, ("model.components.vae.dtype", "not quantised")),
        ("model__path", "models/nowhere/at-all", ("model.path = 'models/nowhere/at-all' does not exist",)),
        ("model__path", "weights.ckpt", ("pickle", "safetensors")),
        ("adapter__targets", "atention", ("adapter.targets = 'atention'", "'attention'")),
        ("adapter__targets", ["*.to_qq"], ("'*.to_qq' matches no layer of unet", "did you mean '*.to_q' (")),
        ("adapter__rules", [{"component": "text_encoder", "match": "q_prj"}], ("adapter.rules[0].match", "'q_prj'")),
        ("adapter__rules", [{"component": "vae", "match": "*"}], ("adapter.rules[0].component = 'vae'",)),
        ("adapter__dropout", 0.5, ("adapter.dropout = 0.5", "DoRA")),
        ("precision__matmul", "fp8", ("precision.matmul = 'fp8'",)),
        ("objective__timesteps", "cosmap", ("objective.timesteps = 'cosmap'", "sdxl")),
        ("model__zero_terminal_snr", True, ("model.prediction = 'epsilon'", "zero terminal SNR")),
        ("data__bucket_step", 72, ("data.bucket_step = 72",)),
        ("run__output_dir", "/dev/null/out", ("run.output_dir = '/dev/null/out' cannot be made: Not a directory",)),
        ("data__cache_dir", "/dev/null", ("data.cache_dir = '/dev/null' cannot be made: File exists",)),
        ("run__device", "cuda", ("run.device = 'cuda'", "no CUDA device")),
        ("step__attention", "flash", ("step.attention = 'flash' needs a GPU", "use 'auto' or 'math'")),
        ("vae__encode", "fast", ("vae.encode = 'fast' needs the TF32 of an Ampere or newer GPU", "leave it out")),
        ("validation", {"every_steps": 1, "samples": [{"prompt": "x", "width": 63}]}, ("63x64", "multiple of 8")),
    ],
)  # fmt: skip
def test_config_mistakes(bench: Workbench, capsys, key: str, value, expected) -> None:
    import torch

    if key == "run__device" and torch.cuda.is_available():
        pytest.skip("a CUDA device is present, so asking for it is no mistake")
    tree = bench.tree(**{key: value})
    if key == "adapter__dropout":
        tree["adapter"]["type"] = "dora"
    if key in ("adapter__kernels", "step__attention", "step__graphs", "vae__encode"):
        tree["run"]["device"] = "cpu"
    refused(bench, capsys, *expected, tree=tree)


@pytest.mark.slow
@pytest.mark.usefixtures("no_forecast")
def test_a_folder_of_which_only_making_it_tells_that_it_cannot_be_made(bench: Workbench, capsys) -> None:
    """Where nothing may be written in it, the plan tells it, too."""
    tree, writable = bench.tree(run__output_dir="/proc/nowhere"), os.access("/proc", os.W_OK)
    refused(bench, capsys, "run.output_dir = '/proc/nowhere' cannot be made", tree=tree, plan=not writable)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run__device", "cuda", "run.device = 'cuda'"),
        ("adapter__kernels", "triton", "adapter.kernels = 'triton'"),
        ("step__graphs", True, "step.graphs = true"),
        ("step__compile", "blocks", "step.compile = 'blocks' on cpu needs a C++ compiler, and there is no no-such-compiler"),
        ("run__deterministic", True, "CUBLAS_WORKSPACE_CONFIG = ':0:0'"),
        ("precision__compute", "bf16", "this is an old card"),
        ("precision__matmul", "fp8", "an old card does not multiply float8"),
    ],
)
def test_a_plan_refuses_what_this_machine_cannot_train(bench: Workbench, capsys, monkeypatch, key, value, expected) -> None:
    """In the words of the training itself."""
    import torch
    from torch._inductor import config as inductor

    tree = bench.tree(**{key: value})
    old_card = key.startswith("precision")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: old_card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if "matmul" in key else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    if key == "precision__matmul":
        tree["model"]["components"] = {"unet": {"dtype": "fp8_e4m3", "compute": "bf16"}}
    messages = []
    for arguments in ([], ["--plan"]):
        with inductor.patch("cpp.cxx", (None, "no-such-compiler")):
            assert cli.main(["--config", str(bench.write(tree)), *arguments]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1] and expected in messages[0]


def in_the_way(tmp: Path) -> str:
    (tmp / "file").write_text("")
    return str(tmp / "file" / "out")


def link_to_nowhere(tmp: Path) -> str:
    (tmp / "link").symlink_to(tmp / "nowhere" / "at all")
    return str(tmp / "link")


def link_to_itself(tmp: Path) -> str:
    (tmp / "link").symlink_to(tmp / "link")
    return str(tmp / "link" / "out")


def tree_of(folder: Path) -> dict[str, tuple[int, int]]:
    """When each name below a folder was last changed, and in what size."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (about.st_mtime_ns, about.st_size) for path, about in found.items()}


WAYS = [in_the_way, link_to_nowhere, link_to_itself]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "place"), [*product(["run__output_dir", "data__cache_dir"], WAYS), ("checkpoint__mirror", lambda tmp: "s3://a/b")]
)
def test_a_plan_refuses_what_this_machine_cannot_write_and_notes_it_for_another(
    bench: Workbench, capsys, monkeypatch, key: str, place: Callable[[Path], str]
) -> None:
    """In the words of the training, and nothing is created."""

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    config = str(bench.write(bench.tree(**{key: place(bench.tmp)})))
    before, messages = tree_of(bench.tmp), []
    for arguments in ([], ["--plan"]):
        assert cli.main(["--config", config, *arguments]) == 2
        messages.append(capsys.readouterr().err)
        assert tree_of(bench.tmp).keys() == before.keys()
        before = before if arguments else tree_of(bench.tmp)  # where a training begins, a page was there for a moment
    assert tree_of(bench.tmp) == before
    named = "checkpoint.mirror = 's3://a/b' needs a library" if "mirror" in key else f"{key.replace('__', '.')} = "
    assert messages[0] == messages[1] and messages[0].startswith(f"error: {named}") and messages[0].count("\n") == 1
    assert cli.main(["--config", config, "--plan_memory", "8GiB"]) == 0
    assert tree_of(bench.tmp) == before
    assert f"note: not on this machine: {messages[0].removeprefix('error: ')}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 2**50])
def test_a_disk_that_is_too_small(bench: Workbench, capsys, monkeypatch, free: int) -> None:
    """A plan refuses it, once all is said; one for another machine, and a start, warn. A start does twice: of encodings when
    the first is there, and of all that is to come."""
    usage = shutil.disk_usage(bench.tmp)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    small = not free
    config = str(bench.write(bench.tree(run__max_steps=1, data__cache_dir=str(bench.tmp / "cache"))))
    before = tree_of(bench.tmp)
    assert cli.main(["--config", config, "--plan"]) == (2 if small else 0)
    said = capsys.readouterr()
    assert said.err.startswith("error: run.output_dir and data.cache_dir need about ") == small and "fits: " in said.out
    assert cli.main(["--config", config, "--plan_memory", "8GiB"]) == 0
    assert ("warning: run.output_dir and data.cache_dir need about " in capsys.readouterr().out) == small
    assert tree_of(bench.tmp) == before
    assert cli.main(["--config", config]) == 0
    out = capsys.readouterr().out
    needs = [line.partition(" need about")[0] for line in out.splitlines() if " need about" in line]
    assert needs == (["warning: data.cache_dir", "warning: data.cache_dir", "warning: run.output_dir"] if small else [])


def test_guidance_for_a_model_without_the_embedding(bench: Workbench, capsys, monkeypatch) -> None:
    """Refused before a weight is read."""

    def without(model: Path) -> None:
        path = model / "transformer/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"guidance_embeds": False}))

    monkeypatch.setattr(TensorFile, "read", lambda *_: pytest.fail("a weight was read"))
    tree = broken_model(bench, without, "flux") | {"objective": {"guidance": 2.0}}
    refused(bench, capsys, "objective.guidance = 2.0 has no effect on this model", "leave it out", tree=tree)


def test_more_text_than_the_tokenizer_takes(bench: Workbench, capsys, monkeypatch) -> None:
    """Refused before a weight is read: the tiny model's T5 takes 512 tokens."""
    monkeypatch.setattr(TensorFile, "read", lambda *_: pytest.fail("a weight was read"))
    tree = bench.tree("flux", data__text_length=513)
    assert cli.main(["--config", str(bench.write(tree))]) == 2
    message = capsys.readouterr().err
    assert "data.text_length = 513" in message and "use at most 512" in message
    # The output folder is there: the tokenizers, which know their length, are read after it was made.
    assert not any(path.is_file() for path in (bench.tmp / "out").rglob("*") if path.name != ".lock")


def test_missing_component_file(bench: Workbench, capsys) -> None:
    tree = broken_model(bench, lambda m: (m / "unet" / "diffusion_pytorch_model.safetensors").unlink())
    refused(bench, capsys, "component 'unet'", "diffusion_pytorch_model.safetensors", tree=tree)


def test_missing_component_config(bench: Workbench, capsys) -> None:
    tree = broken_model(bench, lambda m: (m / "text_encoder_2" / "config.json").unlink())
    refused(bench, capsys, "text_encoder_2/config.json does not exist", tree=tree)


@pytest.mark.parametrize("component", ["unet", "vae"])
def test_truncated_safetensors(bench: Workbench, capsys, component: str) -> None:
    def truncate(model: Path) -> None:
        path = model / component / "diffusion_pytorch_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    refused(bench, capsys, f"{component}/diffusion_pytorch_model.safetensors", "not a complete safetensors file",
            tree=broken_model(bench, truncate))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("conv_in.weight"), ("'conv_in.weight'", "is missing")),
        (lambda t: t.update({"conv_in.weight": t["conv_in.weight"][:1]}), ("'conv_in.weight'", "has shape")),
        (lambda t: t.update({"odd.weight": t["conv_in.weight"]}), ("unexpected tensor 'odd.weight'",)),
    ],
    ids=["missing", "wrong shape", "unexpected"],
)
def test_wrong_tensors_are_named(bench: Workbench, capsys, change, expected) -> None:
    def edit(model: Path) -> None:
        path = model / "unet" / "diffusion_pytorch_model.safetensors"
        tensors = TensorFile(path).read_all()
        change(tensors)
        write_tensors(path, tensors)

    refused(bench, capsys, *expected, tree=broken_model(bench, edit))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ("no images",)),
        ({"broken.jpg": b"\xff\xd8\xff\xe0 not a photo"}, ("broken.jpg",)),
        ({"zero.png": b""}, ("zero.png",)),
        ({"01.jpg": None, "01.txt": b"caf\xe9"}, ("01.txt", "UTF-8")),
    ],
    ids=["empty folder", "unreadable image", "zero bytes", "caption not UTF-8"],
)
def test_bad_data(bench: Workbench, capsys, files: dict, expected) -> None:
    folder = bench.tmp / "photos"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes((PHOTOS / name).read_bytes() if content is None else content)
    refused(bench, capsys, *expected, tree=bench.tree(data__sources=[{"path": str(folder)}]))


@pytest.mark.slow
@pytest.mark.usefixtures("no_forecast")
def test_output_directory_of_another_run(bench: Workbench, capsys) -> None:
    assert cli.main(["--config", str(bench.write(bench.tree(run__max_steps=1)))]) == 0
    out = bench.tmp / "out"
    refused(bench, capsys, "run.seed: 7 -> 8", tree=bench.tree(run__max_steps=1, run__seed=8))
    again = bench.tree(run__max_steps=1)
    refused(bench, capsys, "already holds this run's checkpoints", "--resume_from auto", tree=again, plan=False)
    # A plan writes nothing: it says the same as a warning.
    assert cli.main(["--config", str(out / "config.toml"), "--plan"]) == 0
    said = "".join(capsys.readouterr())
    assert "warning: run.output_dir" in said and "already holds this run's checkpoints; add --resume_from auto" in said
    (out / "config.toml").unlink()
    refused(bench, capsys, "holds another run without a config.toml", tree=bench.tree(run__max_steps=1))


@pytest.mark.slow
def test_resume_under_a_changed_config(bench: Workbench, capsys) -> None:
    assert cli.main(["--config", str(bench.write(bench.tree(run__max_steps=2, run__stop_after=1)))]) == 0
    resume = ("--resume_from", "auto")
    refused(bench, capsys, "optimizer.lr: 0.0001 -> 0.1", tree=bench.tree(optimizer__lr=0.1), arguments=resume)
    refused(bench, capsys, "adapter.rank: 4 -> 8", tree=bench.tree(adapter__rank=8), arguments=resume)
    may_change = bench.tree(
        run__max_steps=3, checkpoint__every_steps=1, export__every_steps=1, logging__tensorboard=True,
        validation__prompts=["a bear"], validation__every_steps=2, validation__steps=1,
    )  # fmt: skip
    assert cli.main(["--config", str(bench.write(may_change)), *resume]) == 0
    assert (bench.tmp / "out" / "adapters" / "bear-00000002.safetensors").exists()


@pytest.mark.slow
def test_resume_where_every_checkpoint_is_invalid(bench: Workbench, capsys) -> None:
    tree = bench.tree(run__max_steps=1)
    assert cli.main(["--config", str(bench.write(tree))]) == 0
    (bench.tmp / "out" / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    refused(bench, capsys, "no valid checkpoint", tree=tree, arguments=("--resume_from", "auto"))
    refused(bench, capsys, "is not a folder", tree=tree, arguments=("--resume_from", "nowhere"))


def test_messages_of_the_command_line_itself(bench: Workbench, capsys, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = bench.write(bench.tree(model__path="nobody/nothing-here"))
    for arguments, said in (
        (("--config", "nowhere.toml"), "tiny_sdxl.toml"), (("--config", str(hub)), "could not be had from the hub"),
        (("--config", "tiny_sdxl.toml", "--set", "runseed"), "--set"),
    ):  # fmt: skip
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_plan_reads_no_weights_and_writes_nothing(bench: Workbench, capsys) -> None:
    """Every weight file's data is replaced by a hole of the same size: planning works all the same."""

    def hollow(model: Path) -> None:
        for path in model.rglob("*.safetensors"):
            size = path.stat().st_size
            start = min(e.start for e in TensorFile(path).entries.values())
            header = path.read_bytes()[:start]
            path.write_bytes(header)
            with open(path, "r+b") as file:
                file.truncate(size)

    tree = broken_model(bench, hollow)
    assert cli.main(["--config", str(bench.write(tree)), "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "unet" in printed and "MiB" in printed and "trainable parameters" in printed and "steps an epoch" in printed
    assert not (bench.tmp / "out").exists()


def test_a_warm_up_that_would_never_end_is_refused_first(bench: Workbench, capsys) -> None:
    assert cli.main(["--config", str(bench.write(bench.tree(run__max_steps=4, schedule__warmup=10)))]) == 2
    message = capsys.readouterr().err
    assert "schedule.warmup = 10" in message and "4 steps" in message and "schedule.total_steps" in message
    assert not (bench.tmp / "out" / "checkpoints").exists()

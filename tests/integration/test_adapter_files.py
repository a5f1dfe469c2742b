"""Adapters travel: a checkpoint gives the files of its run, and files of every kind are read, told and converted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from scripts import sample
from tests.harness import DENOISER, ROOT, Workbench, built, metrics_of, train_built
from trainer.base import console
from trainer.base.errors import UserError
from trainer.base.files import hash_file
from trainer.base.tensorfile import Recipe, TensorFile, write_tensors
from trainer.monitoring import measurements, weight_change
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.resume.initial_adapter import Start, open_start
from workbench.adapter_files.opening import models_at, open_adapter, published
from workbench.adapter_files.start import read_start
from workbench.commands import main as cli

pytestmark = pytest.mark.tool("adapters")

KINDS = {
    "sdxl int8 dora": ("sdxl", {"adapter__type": "dora", "model__components__unet": {"dtype": "int8"}}),
    "sdxl dora": ("sdxl", {"adapter__type": "dora", "adapter__targets": "all"}),
    "flux dora": ("flux", {"adapter__type": "dora", "export__dora_scale": "magnitude"}),
    # Layers of one module of the original layout have one scale: then a conversion changes no number.
    "flux lora": ("flux", {"adapter__rslora": True, "adapter__rules": [
        {"component": "transformer", "match": "*ff.net.2", "rank": 2, "alpha": 3.0},
        {"component": "text_encoder", "match": "*q_proj", "rank": 3},
    ]}),
}  # fmt: skip
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def outputs(models: Path, tmp_path_factory) -> Runs:
    """By the name of a kind, the output folder of four steps with a checkpoint and adapter files every second."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            family, more = KINDS[kind]
            bench = Workbench(models, tmp_path_factory.mktemp("run"))
            options = {
                "adapter__targets": ["*to_q", "*to_v", "*ff.net*"], "adapter__rank": 4, "adapter__alpha": 2.0,
                "adapter__rules": [{"component": DENOISER[family], "match": "*to_v", "rank": 2, "alpha": 3.0}],
                "optimizer__lr": 1e-2, "run__max_steps": 4, "checkpoint__every_steps": 2, "export__every_steps": 2,
            }  # fmt: skip
            with built(bench.config(family, **options | more)) as run:
                assert train_built(run)
            made[kind] = bench.tmp / "out"
        return made[kind]

    return of


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return TensorFile(path).read_all()


def ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """The largest distance, in fp32 numbers between; of numbers of one sign."""
    assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
    return int((one.view(torch.int32).long() - other.view(torch.int32).long()).abs().max())


SLOW_DORAS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("sdxl int8 dora", "flux dora")]


@pytest.mark.parametrize("kind", ["flux lora", *SLOW_DORAS])
def test_a_checkpoint_gives_the_files_of_its_run(outputs: Runs, tmp_path: Path, monkeypatch, kind: str) -> None:
    """Byte for byte, in the middle and at the end, with the model's weights out of reach."""
    out, read = outputs(kind), TensorFile.read
    of_checkpoint = lambda self, *args: read(self, *args) if "step-" in str(self.path) else 1 / 0  # noqa: E731
    monkeypatch.setattr(TensorFile, "read", of_checkpoint)
    for step, name in ((2, "bear-00000002"), (4, "bear")):
        made = tmp_path / f"made-{step}"
        assert script.main(["export", str(out / "checkpoints" / f"step-{step:08d}"), str(made)]) == 0
        for end in ("", "_comfyui"):
            assert (made / f"bear{end}.safetensors").read_bytes() == (out / f"adapters/{name}{end}.safetensors").read_bytes()


def test_no_tool_writes_over_what_is_there(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    """Not the weights of a model, not their own source. The same command again, which writes the same, is no fault."""
    out, mine = outputs("flux lora"), tmp_path / "mine.safetensors"
    source = out / "adapters" / "bear.safetensors"
    mine.write_bytes(before := source.read_bytes())
    checkpoint, taken = str(out / "checkpoints" / "step-00000004"), tmp_path / "exported"
    taken.mkdir()
    (taken / "bear_comfyui.safetensors").write_bytes(b"a model")
    model, base = str(models / "flux"), ["--base", str(models / "flux")]
    for command in (
        ["convert", str(mine), str(mine), "--to", "kohya", *base],
        ["resize", str(mine), str(mine), "--rank", "1", *base],
        ["extract", model, model, str(mine), "--rank", "1"],
        ["export", checkpoint, str(taken)],
    ):
        assert script.main(command) == 2
        assert "exists; remove it, or give another OUT" in capsys.readouterr().err
        assert mine.read_bytes() == before and [path.read_bytes() for path in taken.iterdir()] == [b"a model"]
    for _ in range(2):
        assert script.main(["export", checkpoint, str(tmp_path / "again")]) == 0


def test_a_checkpoint_that_is_not_whole_gives_none(outputs: Runs, tmp_path: Path, capsys) -> None:
    folder = outputs("flux lora") / "checkpoints" / "step-00000002"
    copy = tmp_path / folder.name
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes()[:-1] if path.name == "adapter.safetensors" else path.read_bytes())
    assert script.main(["export", str(copy), str(tmp_path / "made")]) == 2
    assert "is not a valid checkpoint: adapter.safetensors has" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert script.main(["export", str(folder.with_name("step-00000003")), str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err
    assert f"step-00000003 does not exist; {folder.parent} has step-0000000" in said and folder.name in said


def convert(models: Path, family: str, source: Path, to: str, out: Path, *more: str) -> dict[str, torch.Tensor]:
    assert script.main(["convert", str(source), str(out), "--to", to, "--base", str(models / family), *more]) == 0
    return tensors(out)


def test_a_lora_goes_from_one_of_the_runs_files_to_the_other(outputs: Runs, models: Path, tmp_path: Path) -> None:
    """Tensors and scales bit for bit, by every way there and back. rsLoRA's alpha becomes the one that gives its scale."""
    own = outputs("flux lora") / "adapters"
    diffusers, comfyui = own / "bear.safetensors", own / "bear_comfyui.safetensors"
    for to in ("kohya", "comfyui", "lora"):
        there = convert(models, "flux", diffusers, to, tmp_path / f"{to}.safetensors")
        same(there, tensors(comfyui))
        back = convert(models, "flux", tmp_path / f"{to}.safetensors", "diffusers", tmp_path / f"{to}-back.safetensors")
        same(back, tensors(diffusers))
    other = convert(models, "flux", comfyui, "onetrainer", tmp_path / "onetrainer.safetensors")
    assert all(key.startswith(("lora_transformer_", "lora_te1_text_model_")) for key in other)
    same(
        convert(models, "flux", tmp_path / "onetrainer.safetensors", "comfyui", tmp_path / "again.safetensors"),
        tensors(comfyui),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_file_in_16_bits_is_the_fp32_file_rounded(bench: Workbench, tmp_path: Path, capsys, kind: str) -> None:
    """By the run, by the export of its checkpoint in the same bytes, and by a conversion; magnitudes stay fp32."""
    asked = {"adapter__type": kind, "run__max_steps": 2, "optimizer__lr": 1e-2, "checkpoint__every_steps": 2}
    files, names = {}, ("bear.safetensors", "bear_comfyui.safetensors")
    for dtype in ("fp32", "bf16"):
        with built(bench.config("sdxl", run__output_dir=str(tmp_path / dtype), export__dtype=dtype, **asked)) as run:
            assert train_built(run)
        files[dtype] = {name: tensors(tmp_path / dtype / "adapters" / name) for name in names}
    said = capsys.readouterr().out
    assert "export.dtype = 'bf16' takes of a layer's change, at most" in said and said.count("equal\n") >= 2
    for name, wide in files["fp32"].items():
        for key, tensor in files["bf16"][name].items():
            as_wide = key.endswith(("magnitude_vector", "dora_scale", "alpha"))
            assert tensor.dtype == (torch.float32 if as_wide else torch.bfloat16), key
            assert torch.equal(tensor, wide[key].to(tensor.dtype)), key
    checkpoint = next((tmp_path / "bf16" / "checkpoints").iterdir())
    assert script.main(["export", str(checkpoint), str(tmp_path / "made")]) == 0
    own, out = tmp_path / "bf16" / "adapters" / "bear.safetensors", tmp_path / "converted.safetensors"
    assert (tmp_path / "made" / "bear.safetensors").read_bytes() == own.read_bytes()
    source = tmp_path / "fp32" / "adapters" / "bear.safetensors"
    same(convert(bench.models, "sdxl", source, "diffusers", out, "--dtype", "bf16"), tensors(own))
    assert "in bfloat16 at most 0." in capsys.readouterr().out


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdxl dora", "flux dora"])
def test_a_dora_goes_from_one_convention_to_the_other(outputs: Runs, models: Path, tmp_path: Path, kind: str) -> None:
    """A, B and alpha bit for bit; magnitudes of the other convention as the run itself writes them, to two roundings."""
    family, own = KINDS[kind][0], outputs(kind) / "adapters"
    ways = [("bear.safetensors", "comfyui", "bear_comfyui.safetensors", [])]
    if kind == "flux dora":  # one scale for what is one module: its B is not that of the other file
        ways = [(*ways[0][:3], ["--dora_scale", "magnitude"])]
    else:
        ways.append(("bear_comfyui.safetensors", "diffusers", "bear.safetensors", []))
    for source, to, wanted, more in ways:
        made = convert(models, family, own / source, to, tmp_path / f"{to}.safetensors", *more)
        theirs = tensors(own / wanted)
        assert made.keys() == theirs.keys()
        for key, tensor in theirs.items():
            if key.endswith(("dora_scale", "magnitude_vector")):
                assert ulps(made[key], tensor) <= 8, key
            else:
                assert torch.equal(made[key], tensor), key
        assert TensorFile(own / wanted).metadata.keys() <= TensorFile(tmp_path / f"{to}.safetensors").metadata.keys()


@pytest.mark.slow
def test_an_approximation_of_a_dora_states_its_error(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    """Against the dense change by this test's own formula; at full rank nothing is left of it."""
    own, base = outputs("sdxl dora") / "adapters" / "bear.safetensors", str(models / "sdxl")
    lost = {}
    for rank in ("2", "4", "4096"):
        out = tmp_path / f"{rank}.safetensors"
        assert script.main(["convert", str(own), str(out), "--to", "lora", "--base", base, "--rank", rank]) == 0
        said = next(line for line in capsys.readouterr().out.splitlines() if "in place of a DoRA" in line)
        lost[rank] = float(said.split("of a DoRA: ")[1].split("%")[0]) / 100
        file = TensorFile(out)
        assert not any("dora" in key for key in file.entries)
        assert file.metadata["ss_network_module"] == "networks.lora"
        assert "dora" not in json.loads(file.metadata["ss_network_args"])
    assert lost["2"] > lost["4"] > 0 and lost["4096"] < 1e-6


@pytest.mark.slow
def test_show_says_what_a_file_is(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    path, plot = outputs("sdxl dora") / "adapters" / "bear_comfyui.safetensors", tmp_path / "plots" / "a.png"
    assert script.main(["show", str(path), "--base", str(models / "sdxl"), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    for words in ("DoRA for sdxl", "keys: kohya (", "rank: 4 (", "; beside the module", "output (",
                  "where the reader divides by ||W|| (ComfyUI's releases)", "every layer of unet is adapted",
                  "ss_output_name: bear", "||sBA|| / ||W|| by block", "unet.down_blocks.0"):  # fmt: skip
        assert words in said, (words, said)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_show_says_which_layers_are_not_there_in_lines_that_fit(outputs: Runs, models: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "width", lambda stream: 80)
    flux = outputs("flux lora") / "adapters" / "bear_comfyui.safetensors"
    assert script.main(["show", str(flux), "--base", str(models / "flux")]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = " ".join(" ".join(lines).split())
    assert "LoRA for flux" in said and "not adapted of transformer" in said and "block-diagonal (" in said
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize(
    "script_name",
    [pytest.param("adapter.py", marks=pytest.mark.slow), pytest.param("inspect_checkpoint.py", marks=pytest.mark.proof)],
)
def test_a_reader_that_goes_away_ends_it_without_a_word(outputs: Runs, models: Path, script_name: str) -> None:
    """As `| head` does."""
    out = outputs("sdxl dora")
    show = ["show", str(out / "adapters" / "bear.safetensors"), "--base", str(models / "sdxl")]
    told = show if script_name == "adapter.py" else [str(out)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, f"scripts/{script_name}", *told], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0 if script_name == "adapter.py" else -signal.SIGPIPE, "")


# --- adapter.init_from ------------------------------------------------------------------------------------------------


def starting(bench: Workbench, kind: str, source: Path, **more):
    """A config of that kind which starts from `source`."""
    family, options = KINDS[kind]
    chosen = {
        "adapter__targets": ["*to_q", "*to_v", "*ff.net*"], "adapter__rank": 4, "adapter__alpha": 2.0,
        "adapter__rules": [{"component": DENOISER[family], "match": "*to_v", "rank": 2, "alpha": 3.0}],
        "optimizer__lr": 1e-2, "run__max_steps": 2, "adapter__init_from": str(source),
    }  # fmt: skip
    return bench.config(family, **chosen | options | more)


def begun(config) -> dict[str, torch.Tensor]:
    """The adapter's tensors before the first step."""
    with built(config) as run:
        return {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """The largest distance of any tensor, in fp32 numbers between."""
    assert one.keys() == other.keys()
    return max(ulps(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("kind", ["flux lora", *SLOW_DORAS, pytest.param("sdxl dora", marks=pytest.mark.slow)])
def test_a_run_starts_where_another_was(outputs: Runs, bench: Workbench, kind: str) -> None:
    """Its checkpoint and its files, of both formats, invert to its weights within two roundings."""
    out = outputs(kind)
    saved = tensors(out / "checkpoints" / "step-00000002" / "adapter.safetensors")
    checkpoint = begun(starting(bench, kind, out / "checkpoints" / "step-00000002", run__output_dir=str(bench.tmp / "c")))
    file = begun(starting(bench, kind, out / "adapters" / "bear-00000002.safetensors", run__output_dir=str(bench.tmp / "d")))
    kohya = out / "adapters" / "bear-00000002_comfyui.safetensors"
    other = begun(starting(bench, kind, kohya, run__output_dir=str(bench.tmp / "k")))
    assert far(checkpoint, file) == 0
    exact = "int8" not in kind
    assert far(checkpoint, saved) == 0 if exact else far(checkpoint, saved) <= 2
    assert far(other, saved) <= 2


@pytest.mark.slow
def test_a_run_from_a_file_is_a_run_from_its_checkpoint_and_needs_it_once(
    outputs: Runs, bench: Workbench, tmp_path: Path
) -> None:
    """The same bytes to the end. It is resumed without the file; another file at its place is refused."""
    out, file = outputs("flux lora"), tmp_path / "given.safetensors"
    file.write_bytes((out / "adapters" / "bear-00000002.safetensors").read_bytes())
    ends = []
    for name, source in (("c", out / "checkpoints" / "step-00000002"), ("d", file)):
        config = starting(bench, "flux lora", source, run__output_dir=str(bench.tmp / name), checkpoint__every_steps=1)
        with built(config) as run:
            assert train_built(run)
        ends.append((bench.tmp / name / "checkpoints/step-00000002/adapter.safetensors").read_bytes())
        said = json.loads(TensorFile(bench.tmp / name / "adapters" / "bear.safetensors").metadata["started_from"])
        assert said["file"] == source.name and len(said["sha256"]) == 64
    assert ends[0] == ends[1]
    longer = starting(bench, "flux lora", file, run__output_dir=str(bench.tmp / "d"), run__max_steps=3)
    file.write_bytes((out / "adapters" / "bear.safetensors").read_bytes())
    with pytest.raises(UserError, match="is not the file that the run started from"), built(longer, "auto"):
        pass
    file.unlink()
    with built(longer, "auto") as run:
        assert run.progress.step == 2
        assert train_built(run)
    assert json.loads(TensorFile(bench.tmp / "d" / "adapters" / "bear.safetensors").metadata["started_from"]) == said


@pytest.mark.parametrize("kind", ["flux lora", pytest.param("sdxl dora", marks=pytest.mark.slow)])
def test_what_training_changed_is_told_from_the_start(
    outputs: Runs, bench: Workbench, monkeypatch, capsys, kind: str
) -> None:
    """At a rate that changes nothing, nothing was learned, whatever the run started from; after a resume, too."""
    monkeypatch.setattr(measurements, "FIRST", 2)
    source = outputs(kind) / "checkpoints" / "step-00000002"
    moved = {}
    for out, stops in (("whole", [3]), ("parts", [1, 3])):
        for stop in stops:
            changes = {"run__output_dir": str(bench.tmp / out), "run__stop_after": stop, "run__max_steps": 3}
            with built(starting(bench, kind, source, optimizer__lr=1e-9, **changes), "auto") as run:
                assert train_built(run) == (stop == 3)
                moved[out] = (
                    weight_change.weight_change(run.adapter),
                    weight_change.weight_change(run.adapter, run.origin.start.weights),
                )
        assert "warning: nothing was learned: " in capsys.readouterr().out
        report = (bench.tmp / out / "report.html").read_text()
        assert "changes are measured from the weights of adapter.init_from" in report
    assert metrics_of(bench.tmp / "whole") == metrics_of(bench.tmp / "parts")
    (said,) = [row["weight_change"] for row in metrics_of(bench.tmp / "parts") if "weight_change" in row]
    assert 0 <= said < 1e-5
    assert moved["whole"] == moved["parts"]
    beside_zero, beside_start = moved["whole"]
    assert max(block.largest for block in beside_zero.values()) > 1e-3, "the start is no small change itself"
    assert max(max(block.largest, block.drift) for block in beside_start.values()) < 1e-5
    kept = bench.tmp / "parts" / "checkpoints" / "step-00000003"
    assert tensors(kept / "start.safetensors").keys() == tensors(kept / "adapter.safetensors").keys()
    assert far(tensors(kept / "start.safetensors"), tensors(source / "adapter.safetensors")) == 0
    assert not list(source.glob("start*")), "a run that starts anew has none"


def test_a_start_may_have_another_rank_where_that_is_asked_for(outputs: Runs, bench: Workbench) -> None:
    """Grown: the same product. Shrunk: the nearest. Layers that the file has not start as in any run."""
    file = outputs("flux lora") / "adapters" / "bear.safetensors"
    rules = [{"component": "text_encoder", "match": "*q_proj", "rank": 2},
             {"component": "transformer", "match": "*ff.net.2", "rank": 1, "alpha": 3.0}]  # fmt: skip
    more = {"adapter__rank": 6, "adapter__alpha": 1.0, "adapter__rslora": False, "adapter__rules": rules}
    with pytest.raises(UserError, match="rank 4, this run 6; set adapter.rank .* or adapter.init_resize = true"):
        begun(starting(bench, "flux lora", file, **more))
    given = open_adapter(file, models_at(str(bench.models / "flux"))).portable.layers
    with built(starting(bench, "flux lora", file, adapter__init_resize=True, **more)) as run:
        for name, factors in given.items():
            layer, target = run.adapter.layers[name], run.adapter.targets[name]
            a, b = (factor.detach().double() for factor in layer.factors("default"))
            now = target.scaling(False) * b @ a
            then = factors.scaling * factors.b.make().double().flatten(1) @ factors.a.make().double().flatten(1)
            if target.rank >= factors.rank:
                assert torch.allclose(now, then, rtol=1e-6, atol=1e-9), name
                assert not b[:, factors.rank :].any() and a[factors.rank :].abs().max() > 0
            else:
                tail = torch.linalg.svdvals(then)[target.rank :].square().sum().sqrt()
                assert torch.isclose((now - then).norm(), tail, rtol=1e-3), name


@pytest.mark.slow
def test_a_lora_starts_a_dora_that_does_what_it_does(outputs: Runs, bench: Workbench) -> None:
    file = outputs("flux lora") / "adapters" / "bear.safetensors"
    with built(starting(bench, "flux lora", file, adapter__type="dora")) as run:
        for layer in run.adapter.layers.values():
            weight = layer.get_base_layer().dequantize(torch.float32)
            a, b = layer.factors("default")
            lora = weight + (layer.scaling["default"] * b @ a).view_as(weight)
            assert torch.allclose(layer.adapted_weight("default"), lora, rtol=1e-6, atol=1e-7)
            assert bool(b.any())


def test_a_run_starts_from_a_folder_that_peft_saved_at_its_strength(bench: Workbench) -> None:
    """alpha / rank of its config, by the folder and by the file in it; the hash is the file's."""
    folder, layer = bench.tmp / "peft", "transformer_blocks.0.attn.to_q"
    width = models_at(str(bench.models / "flux"))[0].layers("transformer")[layer][1]
    folder.mkdir()
    own = {
        f"base_model.model.{layer}.lora_{end}.weight": t
        for end, t in (("A", torch.ones(4, width)), ("B", torch.ones(width, 4)))
    }
    write_tensors(folder / "adapter_model.safetensors", own)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["to_q"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    for given in (folder, folder / "adapter_model.safetensors"):
        start = started(starting(bench, "flux lora", given, adapter__rules=[]))
        assert start.portable.layers[f"transformer.{layer}"].scaling == 8 / 4**0.5
        assert start.sha256 == hash_file(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"init_lora_weights": "pissa"}))
    assert "init_lora_weights = 'pissa'" in refusal(starting(bench, "flux lora", folder, adapter__rules=[]))


@pytest.mark.slow
def test_whatever_reads_a_file_without_an_alpha_says_so(bench: Workbench, capsys) -> None:
    layer, flux, out = "transformer_blocks.0.attn.to_q", bench.models / "flux", bench.tmp / "of"
    width = models_at(str(flux))[0].layers("transformer")[layer][1]
    ends = (("A", torch.ones(4, width)), ("B", torch.ones(width, 4) / 100))
    file = bench.tmp / "adapter_model.safetensors"
    write_tensors(file, {f"base_model.model.{layer}.lora_{end}.weight": t for end, t in ends})
    (line,) = started(starting(bench, "flux lora", file, adapter__rules=[])).account.lines()
    assert (
        line.startswith(f"assumed: 1 module: no alpha in {file}, so the scale is taken for 1 (") and "if PEFT saved" in line
    )
    config = bench.write(bench.tree("flux", adapter__init_from=str(file)))
    drawn = ["--prompt", "a", "--sampling_steps", "1", "--width", "32", "--height", "32", "--out", f"{out}.drawn"]
    for act, arguments in (
        (cli.main, ["--config", config, "--plan"]), (sample.main, [flux, file, *drawn]),
        (script.main, ["merge", flux, file, f"{out}.merged"]), (script.main, ["show", file, "--base", flux]),
        (script.main, ["convert", file, f"{out}.safetensors", "--base", flux, "--to", "kohya"]),
        (script.main, ["compare", file, file, "--base", flux]),
        (script.main, ["resize", file, f"{out}.2.safetensors", "--base", flux, "--rank", "2"]),
    ):  # fmt: skip
        assert act([*map(str, arguments)]) == 0, arguments
        assert line in " ".join(capsys.readouterr().out.split()), arguments


def started(config) -> Start:
    """What a start with it takes from adapter.init_from, before a weight is read."""
    source = open_source(config)
    plan = make_plan(resolve(config, source), source, processes=1)
    return open_start(config.adapter.init_from, lambda: read_start(plan))


def refusal(config) -> str:
    """What a start with it is refused with, before a weight is read."""
    with pytest.raises(UserError) as refused:
        started(config)
    return str(refused.value)


def test_a_start_that_does_not_fit_is_refused_before_weights_are_read(outputs: Runs, bench: Workbench) -> None:
    lora = outputs("flux lora") / "adapters" / "bear.safetensors"
    assert "does not exist; give an adapter file, a folder that PEFT saved, or a checkpoint" in refusal(
        starting(bench, "flux lora", bench.tmp / "no")
    )
    assert "is not a valid checkpoint" in refusal(starting(bench, "flux lora", bench.tmp))
    fewer = refusal(starting(bench, "flux lora", lora, adapter__targets=["*to_q"]))
    assert "has layers that this run does not adapt" in fewer and 'take them with adapter.targets = "attention+mlp"' in fewer
    other = refusal(starting(bench, "sdxl dora", lora))
    assert "of its 14 modules are those of" in other and "'transformer." in other
    assert "lora_A" not in other and "--base" not in other


def of_encoder(bench: Workbench, zero: Callable[[int], bool], **more: torch.Tensor) -> Path:
    """A file as sd-scripts writes it of SDXL's first encoder: every layer. zero: of a layer's number, whether its B is."""
    tensors = dict(more)
    for name, (rows, columns) in models_at(str(bench.models / "sdxl"))[0].layers("text_encoder").items():
        stem = f"lora_te1_text_model_{name.replace('.', '_')}"
        made = torch.zeros if zero(int(name.split(".")[2])) else torch.ones
        tensors |= {f"{stem}.lora_down.weight": torch.ones(4, columns), f"{stem}.lora_up.weight": made(rows, 4)}
        tensors[f"{stem}.alpha"] = torch.tensor(4)
    write_tensors(bench.tmp / "kohya.safetensors", tensors, {"ss_base_model_version": "sdxl_base_v1-0"})
    return bench.tmp / "kohya.safetensors"


def test_layers_that_change_no_picture_are_left_out_by_name(bench: Workbench) -> None:
    """SDXL reads its first encoder before the last layer: files of sd-scripts have that layer all the same."""
    rule = [{"component": "text_encoder", "match": "*"}]
    last = f"text_encoder.encoder.layers.{bench_layers(bench) - 1}."
    for untrained in (True, False):
        file = of_encoder(bench, lambda number, untrained=untrained: untrained and number == bench_layers(bench) - 1)
        start = started(bench.config("sdxl", adapter__rank=4, adapter__rules=rule, adapter__init_from=str(file)))
        head, line = start.account.lines()
        assert head == "left out: 6 layers" and "change no picture" in line and f"{last}self_attn.k_proj" in line
        assert len(start.portable.layers) == 6 * (bench_layers(bench) - 1) and not any(
            n.startswith(last) for n in start.portable.layers
        )
    trained = bench.config("sdxl", adapter__rank=4, adapter__init_from=str(of_encoder(bench, lambda number: False)))
    assert '[[adapter.rules]] component = "text_encoder", match = "*"' in refusal(trained)
    nothing = bench.config("sdxl", adapter__rank=4, adapter__init_from=str(of_encoder(bench, lambda number: True)))
    assert "has no layer that changes anything in this run" in refusal(nothing)
    stem, width = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q", unet_width(bench)
    unet = {
        f"{stem}.lora_down.weight": torch.ones(4, width),
        f"{stem}.lora_up.weight": torch.ones(width, 4),
        f"{stem}.alpha": torch.tensor(4.0),
    }
    start = started(
        bench.config("sdxl", adapter__rank=4, adapter__init_from=str(of_encoder(bench, lambda number: True, **unet)))
    )
    assert len(start.portable.layers) == 1 and any("their B is zero" in line for line in start.account.lines())


def bench_layers(bench: Workbench) -> int:
    """The layers of the tiny SDXL's first encoder."""
    return json.loads((bench.models / "sdxl" / "text_encoder" / "config.json").read_text())["num_hidden_layers"]


def unet_width(bench: Workbench) -> int:
    """The width of its middle block's attention."""
    layers = models_at(str(bench.models / "sdxl"))[0].layers("unet")
    return layers["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"][0]


def test_a_conversion_reads_a_tensor_a_few_times(tmp_path: Path, monkeypatch) -> None:
    """To check it and to write it, and to compare it with what the three layers of its module share: never as often as there
    are layers. Of the attention of Flux; seconds and memory are measured by benchmarks/adapter_files.py."""
    model = published("flux")[0]
    layers = [name for name in model.layers("transformer") if ".attn." in name]
    file = {
        f"transformer.{name}.{key}": Recipe(torch.bfloat16, size, lambda size=size: torch.ones(size, dtype=torch.bfloat16))
        for name in layers
        for rows, columns in [model.layers("transformer")[name]]
        for key, size in (("lora_A.weight", (1, columns)), ("lora_B.weight", (rows, 1)))
    }
    write_tensors(tmp_path / "a.safetensors", file)
    read, reads = TensorFile.read, Counter()

    def counted(self, name: str, *more):
        if self.path.name == "a.safetensors":
            reads[name] += 1
        return read(self, name, *more)

    monkeypatch.setattr(TensorFile, "read", counted)
    assert script.main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--to", "kohya"]) == 0
    assert reads.keys() == file.keys() and max(reads.values()) <= 2 + 3 and len(file) > 500


def test_a_file_where_its_run_wrote_it_needs_no_base(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    """Its run's config.toml beside it names the model; elsewhere `show` reads sizes in the file, and others ask for it."""
    file = outputs("flux lora") / "adapters" / "bear.safetensors"
    capsys.readouterr()  # of the run
    assert script.main(["show", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("model: ") and said[0].endswith("flux, as config.toml of its run says")
    assert script.main(["compare", str(file), str(file)]) == 0
    assert "flux, as config.toml of its run says" in capsys.readouterr().out
    (moved := tmp_path / "moved.safetensors").write_bytes(file.read_bytes())
    assert script.main(["convert", str(moved), str(tmp_path / "no.safetensors"), "--to", "kohya"]) == 2
    assert "give it with --base" in capsys.readouterr().err
    # Kohya's file has modules of several layers, whose rows are parted.
    assert script.main(["convert", str(file), str(kohya := tmp_path / "kohya.safetensors"), "--to", "kohya"]) == 0
    for path in (moved, kohya):
        capsys.readouterr()
        assert script.main(["show", str(path)]) == 0
        said = capsys.readouterr().out
        assert "LoRA for flux (another size than the published ones; --base MODEL" in said
        assert "not adapted of" not in said and "every layer of" not in said
        own = open_adapter(path, any_size=True).portable.layers
        known = open_adapter(path, models_at(str(models / "flux"))).portable.layers
        assert own.keys() == known.keys()
        for name, factors in known.items():
            ends = own[name].tensors()
            assert all(torch.equal(ends[end].make(), tensor.make()) for end, tensor in factors.tensors().items())


def test_merge_tells_the_order_of_its_arguments(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    file, model, out = outputs("flux lora") / "adapters" / "bear.safetensors", models / "flux", tmp_path / "out"
    for given in (str(file), f"{file}:0.8"):
        assert script.main(["merge", given, str(model), str(out)]) == 2
        right = f"adapter.py merge {model} {given} {out}"
        assert capsys.readouterr().err == f"error: {given} is an adapter file; the model comes first: {right}\n"
    assert script.main(["merge", str(model), str(out), str(file)]) == 2
    assert "OUT comes last: adapter.py merge MODEL ADAPTER OUT" in capsys.readouterr().err

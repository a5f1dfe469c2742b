"""model.cache_dir: converted weights that are found again are the ones that would be made, and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness import Workbench, metrics_of
from trainer.base.tensorfile import TensorFile
from trainer.kernels import decode, dora_torch
from trainer.models import FAMILIES
from trainer.models.opening import open_model
from trainer.plan.storage import Storage
from trainer.quantization import FORMATS, ConvertedWeights, Format, FrozenLayer, library, stored_as
from workbench.commands import main as cli


def load(
    bench: Workbench, format: Format = FORMATS["nf4"], exclude: tuple[str, ...] = (), fingerprint: str = "the model"
) -> tuple[torch.nn.Module, ConvertedWeights]:
    """The tiny Flux transformer, as Run.load has it."""
    component = Storage("transformer", format, torch.float32, exclude)
    converted = ConvertedWeights(bench.tmp, fingerprint=fingerprint, library=library(format))
    source = open_model(FAMILIES["flux"], str(bench.models / "flux"))
    swap = partial(component.swap, kernels=dora_torch)
    module = source.load("transformer", swap=swap, device=torch.device("cpu"), fill=converted.fill)
    converted.store(module)
    return module, converted


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.uint8) if tensor.dim() else tensor for name, tensor in module.state_dict().items()}


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def files(bench: Workbench) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in bench.tmp.glob("*.safetensors")}


@pytest.mark.parametrize("name", ["nf4", "int4", "int8", "fp8_e4m3"])
def test_a_second_start_converts_nothing_and_has_the_same_base(bench: Workbench, monkeypatch, name: str) -> None:
    first, made = load(bench, FORMATS[name])
    assert (made.hits, made.total) == (0, stored_as(first).layers)
    written = files(bench)
    convert = FrozenLayer.load_weight
    converted: list[Format] = []
    monkeypatch.setattr(
        FrozenLayer, "load_weight", lambda self, weight: (converted.append(self.format), convert(self, weight))
    )
    second, found = load(bench, FORMATS[name])
    assert found.hits == found.total == made.total
    assert not any(format.quantised for format in converted)
    assert_equal(first, second)
    assert stored_as(second) == stored_as(first), "sizes and errors are those of the conversion"
    assert files(bench) == written


@pytest.mark.parametrize("damage", ["a byte of a payload", "the header", "the end", "one tensor less"])
def test_a_damaged_file_is_made_again(bench: Workbench, damage: str) -> None:
    exact, made = load(bench)
    ((path, sound),) = files(bench).items()
    broken = bytearray(sound)
    if damage == "a byte of a payload":
        broken[TensorFile(path).entries["transformer_blocks.0.attn.to_q.weight"].start] ^= 1
    elif damage == "the header":
        broken[9] ^= 1
    elif damage == "the end":
        del broken[-1]
    else:
        name = b'"transformer_blocks.0.attn.to_q.weight"'
        broken = broken.replace(name, b'"' + b"x" * (len(name) - 2) + b'"')
    path.write_bytes(broken)
    again, mended = load(bench)
    assert mended.hits == {"the header": 0, "the end": 0}.get(damage, made.total - 1)
    assert_equal(exact, again)
    assert path.read_bytes() == sound


@pytest.mark.slow
def test_whatever_changes_the_conversion_is_another_file(bench: Workbench) -> None:
    load(bench)
    for change in ({"format": FORMATS["fp4"]}, {"exclude": ("*to_q",)}, {"fingerprint": "another model"}):
        count = len(files(bench))
        _, converted = load(bench, **change)
        assert converted.hits == 0 and len(files(bench)) == count + 1, change


@pytest.mark.slow
def test_a_run_may_take_up_the_cache(bench: Workbench, capsys) -> None:
    """It changes no byte, so a resume may change it."""
    stored = {"transformer": {"dtype": "nf4"}, "text_encoder_2": {"dtype": "int8"}}
    tree = bench.tree(
        "flux", model__components=stored, run__max_steps=2, run__stop_after=1, data__cache_dir=str(bench.tmp / "cache"),
        adapter__type="dora",
    )  # fmt: skip
    config, base = str(bench.write(tree)), f"model.cache_dir={bench.tmp / 'base'}"
    on = ["run.stop_after=", base]
    for where, starts in (("straight", [["run.stop_after="]]), ("resumed", [[base], on])):
        for changes in starts:
            overrides = [f"run.output_dir={bench.tmp / where}", *changes]
            sets = [part for override in overrides for part in ("--set", override)]
            assert cli.main(["--config", config, "--resume_from", "auto", *sets]) == 0
    assert "transformer: 40 of 40 converted weights were in model.cache_dir" in capsys.readouterr().out
    files = ("adapter.safetensors", "norms.safetensors", "optimizer.safetensors", "quantization.json")
    exports = ("adapters/bear.safetensors", "adapters/bear_comfyui.safetensors")
    for file in (*(f"checkpoints/step-00000002/{name}" for name in files), *exports):
        one, other = (bench.tmp / where / file for where in ("straight", "resumed"))
        assert one.read_bytes() == other.read_bytes(), file
    norms = TensorFile(bench.tmp / "resumed" / "checkpoints" / "step-00000002" / "norms.safetensors")
    layer = "transformer.single_transformer_blocks.0"  # q, k, v and mlp are one module in ComfyUI
    for name, kinds in ((f"{layer}.attn.to_q", ("base", "original", "adapted")), (f"{layer}.proj_mlp", ("base", "original"))):
        assert {key for key in norms.entries if key.startswith(f"{name}.")} == {f"{name}.{kind}_norm" for kind in kinds}
    assert metrics_of(bench.tmp / "straight") == metrics_of(bench.tmp / "resumed")


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_the_norms_of_the_weights_as_read_are_kept(bench: Workbench, monkeypatch, name: str) -> None:
    """||W16|| of every converted layer against fp64, from a conversion and from the cache, bit for bit."""
    exact = open_model(FAMILIES["flux"], str(bench.models / "flux")).weights("transformer")
    monkeypatch.setattr(decode, "PIECE", 1 << 10)  # several pieces, as in a large layer
    first, _ = load(bench, FORMATS[name])
    second, found = load(bench, FORMATS[name])
    assert found.hits == found.total
    for layer_name, layer in first.named_modules():
        if isinstance(layer, FrozenLayer):
            again = second.get_submodule(layer_name)
            if not layer.format.quantised:
                assert layer.original_norms is None and again.original_norms is None
                continue
            wanted = exact.read(f"{layer_name}.weight").double().flatten(1).norm(dim=1)
            assert layer.original_norms.dtype == torch.float32 and torch.equal(layer.original_norms, again.original_norms)
            assert float((layer.original_norms / wanted - 1).abs().max()) < 1e-6
            assert not torch.equal(layer.original_norms, layer.row_norms())

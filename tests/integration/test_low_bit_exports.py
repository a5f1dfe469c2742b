"""A DoRA trained over a low-bit base, exported for the 16-bit model, and read by PEFT and by ComfyUI's formulas.

W16 is the weight in the model's file, W what it becomes in memory. Whatever was trained, the files must give g (W16 + s B A).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product, repeat
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from tests.harness import DENOISER
from trainer.adapters import Adapter, Method, Target, export, inject, sd_scripts
from trainer.adapters.kinds import kind_named
from trainer.adapters.norms import Norms, RowNorms, made_for, magnitude, read_norms
from trainer.adapters.portable import of_adapter
from trainer.adapters.targets import fused_modules, fused_with
from trainer.base.errors import UserError
from trainer.base.tensorfile import Recipe, TensorFile, Tensors, serialize
from trainer.base.types import Link
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.opening import open_model
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear, freeze_layers, storage_of_layers

STOCK = {"sdxl": UNet2DConditionModel, "flux": FluxTransformer2DModel}
LOW_BIT = ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4")
STORED = ("fp8_e4m3", "int2", "nf4")  # one of each kind of storage
SCALING = 0.5  # alpha / rank

# The largest error of a row's norm by the "magnitude" convention, measured over all layers of both tiny models with s B A
# three times as large as W, and rounded up. Their rows are short, so that W16 - W is less orthogonal to s B A than in a real
# model.
ROW_ERROR = {"fp8_e4m3": 0.01, "fp8_e5m2": 0.02, "int8": 0.002, "int4": 0.024, "int2": 0.13, "nf4": 0.03, "fp4": 0.031}
# Each with a large update, where the norms are off most, over one family; each kind with a small one over the other.
TRIED = (*zip(cycle(STOCK), LOW_BIT, repeat(3.0), strict=False), ("flux", "fp8_e4m3", 0.1), ("flux", "int2", 0.1),
         ("sdxl", "nf4", 0.1))  # fmt: skip


def made(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: t.make() if isinstance(t, Recipe) else t for name, t in tensors.items()}


@dataclass
class Trained:
    """A family's denoiser with a DoRA on it, and what the run would export."""

    family: str
    adapter: Adapter
    norms: Norms
    fused: dict[str, list[Link]]
    base_layer: Callable[[str], FrozenLayer]

    def change(self, size: float, seed: int = 0) -> Trained:
        """Random B, s B A being `size` times as large as W row by row on average, and m moved by some 10 %."""
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, layer in self.adapter.layers.items():
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                b.copy_(torch.randn(b.shape, generator=g))
                added = SCALING * (b.flatten(1) @ a.flatten(1)).norm()
                b.mul_(size * self.base_layer(name).row_norms().norm() / added)
                m = layer.lora_magnitude_vector["default"].weight
                m.mul_(1 + 0.1 * torch.randn(m.shape, generator=g))
        self.adapter.mark_stale()
        return self

    def kohya(self, convention: str, norms: dict[str, RowNorms] | None = None) -> dict[str, torch.Tensor]:
        norms = norms or self.norms.now()
        tensors = sd_scripts.kohya_tensors(
            of_adapter(self.adapter, norms, convention), modules=self.fused, norms=norms,
            prefixes=FAMILIES[self.family].kohya_prefixes({}.get), rows=lambda name: self.base_layer(name).weight_shape[0],
        )  # fmt: skip
        return made(tensors)

    def diffusers(self) -> dict[str, torch.Tensor]:
        return made(export.diffusers_tensors(of_adapter(self.adapter, self.norms.now(), "magnitude")))

    def write_diffusers(self, path: Path) -> Path:
        metadata = export.diffusers_metadata(of_adapter(self.adapter, self.norms.now(), "magnitude"))
        path.write_bytes(b"".join(serialize(self.diffusers(), metadata)))
        return path

    def intended(self, name: str, original: torch.Tensor) -> torch.Tensor:
        """g (W16 + s B A) in fp64, [N, K], with the g that was trained; W16 of a layer without an adapter."""
        w16 = original.double().flatten(1)
        if name not in self.adapter.layers:
            return w16
        layer = self.adapter.layers[name]
        w = layer.get_base_layer().dequantize(torch.float32).double().flatten(1)
        a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        added = SCALING * b.detach().double().flatten(1) @ a.detach().double().flatten(1)
        g = layer.lora_magnitude_vector["default"].weight.detach().double() / (w + added).norm(dim=1)
        return g[:, None] * (w16 + added)


def trained(models: Path, family: str, dtype: str, targets: tuple[str, ...] = ("",)) -> Trained:
    """targets: parts of the names of the layers to adapt; ("",): all, Conv2d too."""
    name, source = DENOISER[family], open_model(FAMILIES[family], str(models / family))
    format = FORMATS[dtype]
    choose = storage_of_layers(format=format, compute=torch.float32, unquantised=torch.float32)
    swap = partial(freeze_layers, choose=choose, kernels=dora_torch)
    module = source.load(name, swap=swap, device=torch.device("cpu"))
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, FrozenLayer)}
    chosen = [n for n in layers if any(part in n for part in targets)]
    adapter = inject(
        {name: module},
        [Target(name, n, rank=4, alpha=4 * SCALING) for n in chosen],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(kind_named("dora")),
        seed=7,
    )
    fused = {name: fused_modules(FAMILIES[family].module_links(name, source.config(name)))}
    full = {f"{name}.{n}": layer for n, layer in layers.items()}
    beside = {n: full[n] for n in fused_with(adapter.targets, fused)}
    return Trained(family, adapter, Norms(adapter, beside, {}), fused, full.__getitem__)


@pytest.fixture(scope="module")
def stock(models: Path) -> Callable[[str], torch.nn.Module]:
    """The 16-bit model in fp32, as diffusers loads it."""
    loaded: dict[str, torch.nn.Module] = {}

    def load(family: str) -> torch.nn.Module:
        if family not in loaded:
            loaded[family] = STOCK[family].from_pretrained(
                models / family, subfolder=DENOISER[family], torch_dtype=torch.float32
            )
        return loaded[family]

    return load


def merged_by_peft(model: torch.nn.Module, path: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(layer, W16, the weight that PEFT computes with under the file's adapter) of every layer the file adapts."""
    from peft.tuners.lora import LoraLayer

    model.load_lora_adapter(path, prefix=prefix, adapter_name="default", use_safetensors=True)
    try:
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                before = layer.get_base_layer().weight.detach().clone()
                layer.merge()
                after = layer.get_base_layer().weight.detach().clone()
                layer.unmerge()
                layer.get_base_layer().weight.data.copy_(before)
                yield name, before, after
    finally:
        model.unload_lora()


def read_by_comfyui(w16: torch.Tensor, tensors: dict[str, torch.Tensor], key: str, released: bool) -> torch.Tensor:
    """ComfyUI's weight_decompose without its eps, fp64 [N, K]: released versions divide by ||W||, corrected by ||V||."""
    up, down = (tensors[f"{key}.lora_up.weight"].double().flatten(1), tensors[f"{key}.lora_down.weight"].double().flatten(1))
    v = w16 + float(tensors[f"{key}.alpha"]) / down.shape[0] * (up @ down)
    norm = (w16 if released else v).norm(dim=1)
    return v * (tensors[f"{key}.dora_scale"].double().flatten() / norm)[:, None]


def kohya_modules(run: Trained, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(kohya key, W16 of the module in the original layout, intended weight there), [N, K] fp64."""
    prefix, family = DENOISER[run.family], FAMILIES[run.family]
    for module in run.fused[prefix]:
        names = [f"{prefix}.{part}" for part in module.parts]
        if not any(name in run.adapter.layers for name in names):
            continue
        originals = [model.get_submodule(part).weight.detach() for part in module.parts]
        both = [
            torch.cat([w.double().flatten(1) for w in originals]),
            torch.cat([run.intended(name, w) for name, w in zip(names, originals, strict=True)]),
        ]
        if module.swap:
            both = [torch.cat(weight.chunk(2)[::-1]) for weight in both]
        yield f"{family.kohya_prefixes({}.get)[prefix]}_{module.original.replace('.', '_')}", *both


def rows_off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest ||got_n - wanted_n|| / ||wanted_n||, over the rows that are not zero."""
    norm = wanted.norm(dim=1)
    off = (got - wanted).norm(dim=1)
    assert bool((off[norm == 0] == 0).all())
    return float((off / norm)[norm > 0].max())


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d == "int2" else pytest.mark.slow) for d in STORED])
def test_an_untrained_dora_is_the_identity_on_the_16bit_model(models: Path, tmp_path: Path, stock, dtype: str) -> None:
    run, model = trained(models, "sdxl", dtype), stock("sdxl")
    seen = 0
    for name, w16, merged in merged_by_peft(model, run.write_diffusers(tmp_path / "a.safetensors"), "unet"):
        assert rows_off(merged.double().flatten(1), w16.double().flatten(1)) < 1e-6, name
        seen += 1
    assert seen == len(run.adapter.layers) and any(isinstance(run.base_layer(n), FrozenConv2d) for n in run.adapter.layers)
    for convention in ("comfyui_released", "magnitude"):
        tensors, modules = run.kohya(convention), 0
        for key, w16, _ in kohya_modules(run, model):
            assert rows_off(read_by_comfyui(w16, tensors, key, convention == "comfyui_released"), w16) < 1e-6, key
            modules += 1
        assert modules == sum(key.endswith(".alpha") for key in tensors)


@pytest.mark.parametrize(
    ("family", "dtype", "size"),
    [pytest.param(*case, marks=() if case in TRIED and case[1] == "int2" else
                  pytest.mark.slow if case in TRIED else pytest.mark.proof)
     for case in product(STOCK, LOW_BIT, (0.1, 3.0))],
)  # fmt: skip
def test_a_trained_dora(models: Path, tmp_path: Path, stock, family: str, dtype: str, size: float) -> None:
    """Exact for ComfyUI's releases. For readers that divide by ||W16 + s B A||, each row has its direction, and its norm but
    for 2 s <(W16 - W)_n, (B A)_n> under the root."""
    run, model = trained(models, family, dtype).change(size), stock(family)
    released, corrected = run.kohya("comfyui_released"), run.kohya("magnitude")
    worst, over_corrected = 0.0, 0.0
    for key, w16, wanted in kohya_modules(run, model):
        assert rows_off(read_by_comfyui(w16, released, key, True), wanted) < 2e-6, key
        got = read_by_comfyui(w16, corrected, key, False)
        ratio = got.norm(dim=1) / wanted.norm(dim=1)
        assert rows_off(got / ratio[:, None], wanted) < 1e-6, key
        worst = max(worst, float((ratio - 1).abs().max()))
    for name, w16, merged in merged_by_peft(model, run.write_diffusers(tmp_path / "a.safetensors"), DENOISER[family]):
        full = f"{DENOISER[family]}.{name}"
        wanted, layer = run.intended(full, w16), run.adapter.layers[full]
        ratio = merged.double().flatten(1).norm(dim=1) / wanted.norm(dim=1)
        assert rows_off(merged.double().flatten(1) / ratio[:, None], wanted) < 1e-5, name
        a, b = (getattr(layer, f"lora_{f}")["default"].weight.detach().double().flatten(1) for f in "AB")
        lost = w16.double().flatten(1) - run.base_layer(full).dequantize(torch.float32).double().flatten(1)
        missing = 2 * SCALING * (lost * (b @ a)).sum(1)
        adapted_sq = (w16.double().flatten(1) + SCALING * b @ a).square().sum(1)
        assert torch.allclose(ratio.square(), 1 - missing / adapted_sq, rtol=1e-5, atol=1e-5), name
        worst = max(worst, float((ratio - 1).abs().max()))
        norms = run.norms.now()[full]
        plainly = (norms.adapted * norms.reader / norms.base).double() / adapted_sq.sqrt()
        over_corrected = max(over_corrected, float((plainly - 1).abs().max()))
    print(f"{family} {dtype} {size}: a row's norm is off by {worst:.2%} at most; by m ||W16|| / ||W||, {over_corrected:.2%}")
    assert worst < ROW_ERROR[dtype]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "nf4"])
def test_rows_without_an_adapter_in_a_fused_layer_stay_the_16bit_ones(models: Path, stock, dtype: str) -> None:
    """Flux's q, k, v and mlp are one module in ComfyUI; only q is adapted."""
    run, model = trained(models, "flux", dtype, ("to_q",)).change(0.3), stock("flux")
    for convention in ("comfyui_released", "magnitude"):
        tensors, fused = run.kohya(convention), 0
        for key, w16, wanted in kohya_modules(run, model):
            got = read_by_comfyui(w16, tensors, key, convention == "comfyui_released")
            bare = (tensors[f"{key}.lora_up.weight"] == 0).all(1)
            assert 0 < int(bare.sum()) < len(bare)
            assert rows_off(got[bare], wanted[bare]) < 1e-6 and torch.equal(wanted[bare], w16[bare])
            assert rows_off(got, wanted) < (2e-6 if convention == "comfyui_released" else ROW_ERROR[dtype])
            fused += 1
        assert fused == sum(key.endswith(".alpha") for key in tensors)


@pytest.mark.slow
def test_a_dense_base_is_exported_as_it_is(models: Path) -> None:
    """Nothing was quantised: m itself, and m ||W|| / c, bit for bit."""
    run = trained(models, "sdxl", "bf16").change(0.3)
    diffusers = run.diffusers()
    for name, tensor in run.adapter.state_dict().items():
        assert torch.equal(diffusers[name].flatten(), tensor.flatten())
    released, corrected = run.kohya("comfyui_released"), run.kohya("magnitude")
    for module in run.fused["unet"]:
        key = f"lora_unet_{module.original.replace('.', '_')}.dora_scale"
        if key not in released:  # a normalisation
            continue
        layer = run.adapter.layers[f"unet.{module.parts[0]}"]
        m = layer.lora_magnitude_vector["default"].weight.detach()
        assert torch.equal(corrected[key].flatten(), m)
        wanted = m * layer.base_norm_sq.sqrt() / layer.current_norm("default")
        assert torch.equal(released[key].flatten(), wanted)


def test_the_checkpoints_norms_are_enough_for_the_files(models: Path, tmp_path: Path) -> None:
    run = trained(models, "flux", "int4", ("to_q", "ff.net.0")).change(0.3)
    state = run.norms.state_dict()
    path = tmp_path / "norms.safetensors"
    path.write_bytes(b"".join(serialize({k: t for k, t in state.items() if isinstance(t, torch.Tensor)})))
    read = read_norms(TensorFile(path).read_all())
    bare = "transformer.single_transformer_blocks.0.proj_mlp"
    assert read[bare].adapted is None and torch.equal(read[bare].base, run.base_layer(bare).row_norms())
    for convention in ("comfyui_released", "magnitude"):
        live, again = run.kohya(convention), run.kohya(convention, read)
        assert live.keys() == again.keys() and all(torch.equal(live[key], again[key]) for key in live)


def test_other_norms_are_refused_and_c_is_computed_again(models: Path) -> None:
    run = trained(models, "flux", "int8", ("to_q",)).change(0.3)
    whole = run.norms.state_dict()
    run.norms.load_state_dict(whole)
    layer = "transformer.transformer_blocks.0.attn.to_q"
    beside = "transformer.transformer_blocks.0.attn.to_k"
    for key in (f"{layer}.original_norm", f"{layer}.base_norm", f"{beside}.original_norm", f"{beside}.base_norm"):
        for changed, how in (
            (whole | {key: whole[key] * (1 + 1e-3)}, "differs"),
            (whole | {key: whole[key][:-1]}, "differs"),
            (whole | {key: whole[key].double()}, "differs"),
            (whole | {key: torch.full_like(whole[key], float("nan"))}, "differs"),
            ({name: value for name, value in whole.items() if name != key}, "is not in the checkpoint"),
        ):
            with pytest.raises(UserError, match=f"row norms are not those of the checkpoint: {beside[:11]}.*{how}"):
                run.norms.load_state_dict(changed)
    with pytest.raises(UserError, match="else.base_norm is not there now; restore the model"):
        run.norms.load_state_dict(whole | {"else.base_norm": torch.ones(2), "else.original_norm": torch.ones(2)})
    with pytest.raises(
        UserError, match=r"is for the weights as .* \(unet: nf4\).*, this run's for the model's weights before"
    ):
        run.norms.load_state_dict(whole | {"held": {"unet": "nf4"}})
    key = f"{layer}.adapted_norm"
    run.norms.load_state_dict(whole | {key: whole[key] * 2})
    assert torch.equal(run.norms.state_dict()[key], whole[key])


@pytest.mark.parametrize("taken", [0.5, 0.7, 0.9, 1.0, 1.1])
def test_a_row_that_training_takes_away_has_a_norm_still(taken: float) -> None:
    """s B A = -taken W, over a W that the quantisation made longer by noise: the plain sum is negative, and truly so."""
    g = torch.Generator().manual_seed(3)
    w16 = torch.randn(16, 4096, generator=g)
    w = w16 + 0.5 * torch.randn(16, 4096, generator=g)
    a, b = w, -taken * torch.eye(16)  # rank 16 is all of it
    c = (w + b @ a).norm(dim=1)
    norms = RowNorms(w.norm(dim=1), w16.norm(dim=1), c.clamp_min(2**-12 * w.norm(dim=1)))
    plain = norms.adapted.square() + norms.original.square() - norms.base.square()
    assert bool((plain < 0).all()) == (taken > 0.6)
    g_N = 1.3
    got = magnitude(g_N * norms.adapted, a, b, 1.0, norms)
    assert got.dtype == torch.float32 and torch.isfinite(got).all()
    # The noise is orthogonal to W16 but for chance, in 4096 dimensions: 1.6 % of its norm is one standard deviation.
    assert float((got / (g_N * (w16 + b @ a).norm(dim=1)) - 1).abs().max()) < 0.1


def test_a_row_that_shrinks_step_by_step_has_a_norm_that_does_so_too() -> None:
    """Where one formula takes the place of the other there was a leap by the root of two."""
    g = torch.Generator().manual_seed(3)
    w16 = torch.randn(4, 4096, generator=g)
    w = w16 + 0.5 * torch.randn(4, 4096, generator=g)
    before = None
    for taken in torch.linspace(0.1, 0.9, 801).tolist():
        b = -taken * torch.eye(4)
        norms = RowNorms(w.norm(dim=1), w16.norm(dim=1), (w + b @ w).norm(dim=1))
        got = magnitude(norms.adapted, w, b, 1.0, norms)
        if before is not None:
            assert float((got / before - 1).abs().max()) < 0.02, taken
        before = got


def test_a_row_of_zeros_keeps_its_magnitude() -> None:
    zero = torch.zeros(3)
    m = torch.tensor([0.0, 0.5, 2.0])
    norms = RowNorms(zero, zero, zero)
    assert torch.equal(magnitude(m, torch.ones(2, 8), torch.zeros(3, 2), 1.0, norms), m)


@pytest.mark.slow
def test_the_files_say_what_base_they_are_for(models: Path, tmp_path: Path) -> None:
    run = trained(models, "sdxl", "fp8_e4m3", ("attn1.to_q",)).change(0.1)
    quantised = "as the model's file holds them quantised (unet: nf4)"
    for held, words in (({}, "before they were quantised"), ({"unet": "nf4"}, quantised)):
        about = export.About(
            name="bear", started="2025-01-01T00:00:00+00:00", step=1, epoch=1, learning_rate=1e-4, train_images=1,
            resolution="64x64", trigger_phrase="", seed=7, dora_base=made_for(held), entries={},
        )  # fmt: skip
        files = export.AdapterFiles(
            folder=tmp_path, formats=("diffusers", "comfyui"), dora_scale="comfyui_released", fused=run.fused, rows=len,
            prefixes=FAMILIES["sdxl"].kohya_prefixes({}.get),
        )  # fmt: skip
        own, norms = partial(of_adapter, run.adapter, run.norms.now()), run.norms.now()
        written = export.write_files(files, "bear", about, own, norms)
        for path in written.values():
            assert words in json.loads(TensorFile(path).metadata["ss_network_args"])["dora_base"]

"""Every source of weights gives the same model; loading streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import DENOISER, ROOT, Workbench
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.plan.storage import Storage
from trainer.quantization import FORMATS

CPU = torch.device("cpu")


def swap_for(name: str, dtype: str = "fp32", compute: torch.dtype = torch.float32, keep=()) -> Callable[[nn.Module], None]:
    return partial(Storage(name, FORMATS[dtype], compute, keep).swap, kernels=dora_torch)


def state_of(source, name: str, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    module = source.load(name, swap=swap_for(name, dtype), device=CPU)
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_single_file_equals_folder_equals_stock(bench: Workbench, family: str) -> None:
    import diffusers
    import transformers

    folder = open_model(FAMILIES[family], str(bench.models / family))
    single = open_model(FAMILIES[family], str(bench.models / f"{family}-one.safetensors"))
    for component in FAMILIES[family].components:
        ours, one = state_of(folder, component.name), state_of(single, component.name)
        stock_class = getattr({"diffusers": diffusers, "transformers": transformers}[component.library], component.class_name)
        stock = stock_class.from_pretrained(bench.models / family / component.name).float().state_dict()
        assert len(stock) == len(ours)
        for name, tensor in stock.items():
            owner, _, leaf = name.rpartition(".")
            key = name if name in ours else f"{owner}.payload_{leaf}"
            assert torch.equal(ours[key].float(), tensor), name
            assert torch.equal(one[key], ours[key]), name


@pytest.mark.slow
def test_transformer_under_comfyui_prefix_and_a_components_own_path(bench: Workbench) -> None:
    original = TensorFile(bench.models / "flux-one.safetensors")
    prefixed = bench.tmp / "prefixed.safetensors"
    write_tensors(prefixed, {f"model.diffusion_model.{k}": v for k, v in original.read_all().items()})
    source = open_model(
        FAMILIES["flux"], str(prefixed), config=str(bench.models / "flux"),
        component_paths={"vae": str(bench.models / "flux" / "vae"), "text_encoder": str(bench.models / "flux"),
                         "text_encoder_2": str(bench.models / "flux/text_encoder_2/model.safetensors")},
    )  # fmt: skip
    folder = open_model(FAMILIES["flux"], str(bench.models / "flux"))
    for component in FAMILIES["flux"].components:
        ours, theirs = state_of(source, component.name), state_of(folder, component.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert load_tokenizers(FAMILIES["flux"], source)["tokenizer_2"]("a bear").input_ids


def test_single_flux_file_alone_asks_for_the_other_components(bench: Workbench) -> None:
    alone = bench.tmp / "alone.safetensors"
    alone.write_bytes((bench.models / "flux-one.safetensors").read_bytes())
    source = open_model(FAMILIES["flux"], str(alone), config=str(bench.models / "flux-one"))
    with pytest.raises(UserError, match="model.components.vae.path"):
        open_model(FAMILIES["flux"], str(alone), config=str(_configs_only(bench))).weights("vae")
    assert source.weights("transformer").files[0].path == alone


def _configs_only(bench: Workbench) -> Path:
    folder = bench.tmp / "configs-only"
    for path in (bench.models / "flux").rglob("*.json"):
        target = folder / path.relative_to(bench.models / "flux")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


@pytest.mark.slow
def test_v_prediction_markers_of_a_single_file(bench: Workbench) -> None:
    path = bench.tmp / "v.safetensors"
    command = [sys.executable, "scripts/make_model.py", "--size", "tiny", "--family", "sdxl", "--layout", "single_file"]
    subprocess.run([*command, str(path), "--prediction", "v"], cwd=ROOT, check=True, timeout=60)
    source = open_model(FAMILIES["sdxl"], str(path))
    choices = dict(min_snr_gamma=None, timesteps="auto", shift="auto", logit_mean=0.0, logit_std=1.0)

    def resolve(**asked):
        return FAMILIES["sdxl"].images.objective(source.scheduler, source.markers, **asked, **choices)

    auto = resolve(prediction="auto", zero_terminal_snr="auto")
    assert auto.prediction == "v" and auto.alphas_cumprod[-1] == 0
    assert resolve(prediction="epsilon", zero_terminal_snr=False).prediction == "epsilon"
    source.verify("unet")  # the marker tensors are on the allow-list


@pytest.mark.slow
def test_per_component_dtypes(bench: Workbench) -> None:
    """An fp32 CLIP beside a float8 denoiser: each layer is stored and computes as its own component says."""
    for family, denoiser in DENOISER.items():
        source = open_model(FAMILIES[family], str(bench.models / family))
        sensitive = FAMILIES[family].component(denoiser).sensitive
        swap = swap_for(denoiser, "fp8_e4m3", torch.bfloat16, sensitive)
        module = source.load(denoiser, swap=swap, device=CPU)
        stored = {layer.payload_weight.dtype for layer in module.modules() if hasattr(layer, "payload_weight")}
        assert stored == {torch.float8_e4m3fn, torch.bfloat16}
        others = {p.dtype for name, p in module.named_parameters()}
        assert others == {torch.float32}, "norms and biases are fp32"
        clip = source.load("text_encoder", swap=swap_for("text_encoder"), device=CPU)
        assert {t.dtype for t in clip.state_dict().values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_diffsynth_450_a_float8_component_never_hands_on_float8(bench: Workbench) -> None:
    """DiffSynth-Studio 450: convolutions and unmapped leaves kept float8. Here only layers with a forward of ours are."""
    source = open_model(FAMILIES["sdxl"], str(bench.models / "sdxl"))
    for name in ("unet", "text_encoder", "text_encoder_2"):
        module = source.load(name, swap=swap_for(name, "fp8_e4m3", torch.bfloat16), device=CPU)
        for key, tensor in module.state_dict().items():
            if tensor.dtype == torch.float8_e4m3fn:
                assert key.endswith(".payload_weight"), key
    ids = torch.arange(5, 82)[None]
    encoder = source.load("text_encoder", swap=swap_for("text_encoder", "fp8_e4m3", torch.bfloat16), device=CPU)
    output = encoder(ids, output_hidden_states=True)
    assert {h.dtype for h in output.hidden_states} == {torch.bfloat16}


def test_t5_keeps_its_wo_layers_in_fp32_under_fp16(bench: Workbench) -> None:
    source = open_model(FAMILIES["flux"], str(bench.models / "flux"))
    swap = swap_for("text_encoder_2", "fp16", torch.float16)
    module = source.load("text_encoder_2", swap=swap, device=CPU)
    wo = [layer for name, layer in module.named_modules() if name.endswith(".wo")]
    assert wo and all(layer.payload_weight.dtype == torch.float32 for layer in wo)
    assert all(layer.compute_dtype == torch.float32 for layer in wo)
    assert torch.isfinite(module(torch.arange(3, 20)[None])[0]).all()


@pytest.mark.slow
def test_record_is_deterministic_and_sees_every_bit(bench: Workbench) -> None:
    from trainer.quantization import record

    source = open_model(FAMILIES["sdxl"], str(bench.models / "sdxl"))
    load = lambda: source.load("unet", swap=swap_for("unet", "fp8_e4m3"), device=CPU)  # noqa: E731
    one, two = load(), load()
    first = record([("unet", one)])
    assert first == record([("unet", two)]) and first
    layer = next(x for x in two.modules() if hasattr(x, "payload_scale"))
    layer.payload_scale[0] = torch.nextafter(layer.payload_scale[0], torch.tensor(9.0))
    assert record([("unet", two)]) != first


@pytest.mark.proof
def test_peak_memory_of_loading_a_float8_component() -> None:
    """VmHWM stays below the final size + the largest tensor + 1 GiB, from a bf16 file of 2 GiB (the script checks)."""
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_loading.py", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_flux_sees_its_timestep_in_fp32_under_bf16(bench: Workbench) -> None:
    """The stock forward rounds t to bf16 before it multiplies by 1000: 0.501 becomes 0.5."""
    source = open_model(FAMILIES["flux"], str(bench.models / "flux"))
    swap = swap_for("transformer", "bf16", torch.bfloat16)
    module = source.load("transformer", swap=swap, device=CPU)
    seen = []
    module.time_text_embed.time_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    config = module.config
    module(
        hidden_states=torch.zeros(1, 4, config.in_channels), timestep=torch.tensor([0.501]), guidance=torch.tensor([1.003]),
        encoder_hidden_states=torch.zeros(1, 3, config.joint_attention_dim),
        pooled_projections=torch.zeros(1, config.pooled_projection_dim), img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3),
    )  # fmt: skip
    assert [t.dtype for t in seen] == [torch.float32] * 2
    assert seen[0].item() == pytest.approx(501.0, abs=1e-3) and seen[1].item() == pytest.approx(1003.0, abs=1e-3)


def test_t5_holds_its_embedding_table_once(bench: Workbench) -> None:
    source = open_model(FAMILIES["flux"], str(bench.models / "flux"))
    module = source.load("text_encoder_2", swap=swap_for("text_encoder_2"), device=CPU)
    assert module.shared.weight.data_ptr() == module.encoder.embed_tokens.weight.data_ptr()

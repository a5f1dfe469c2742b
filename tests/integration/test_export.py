"""Exported files in their consumers: a stock diffusers pipeline, and kohya's and ComfyUI's formulas written out here."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import adapter as script
from tests.harness import DENOISER, Workbench, built, train_built
from trainer.base.tensorfile import TensorFile
from trainer.run import run as runs

CELLS = [  # storage does not reach the file: one family shows it
    ("sdxl", "dora", "bf16"), ("flux", "lora", "bf16"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in
    (("sdxl", "lora", "bf16"), ("flux", "dora", "bf16"), ("flux", "dora", "fp8_e4m3"), ("flux", "lora", "fp8_e4m3")))
]  # fmt: skip


def train(bench: Workbench, family: str, kind: str, dtype: str, **more) -> runs.Run:
    """Three steps at a high rate, with alpha = rank / 2 and a rule of another rank; returns the finished run."""
    denoiser = DENOISER[family]
    config = bench.config(
        family,
        **{f"model__components__{denoiser}": {"dtype": dtype}},
        adapter__type=kind,
        adapter__targets="attention+mlp",
        adapter__rank=4,
        adapter__alpha=2.0,
        adapter__rules=[{"component": denoiser, "match": "*to_v", "rank": 2, "alpha": 3.0}],
        optimizer__lr=1e-2,
        validation__every_steps=3,
        validation__steps=2,
        validation__prompts=["a bear"],
        **more,
    )
    with built(config) as run:
        assert train_built(run)
    return run


def inputs_for(family: str, run: runs.Run):
    """Random inputs of the denoiser's stock forward, fp32."""
    g = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    config = run.model.configs[run.family.denoiser]
    if family == "sdxl":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        return dict(
            sample=normal(2, 4, 8, 8), timestep=torch.tensor([10, 700]),
            encoder_hidden_states=normal(2, 77, config["cross_attention_dim"]),
            added_cond_kwargs={"text_embeds": normal(2, pooled), "time_ids": torch.full((2, 6), 64.0)},
        )  # fmt: skip
    return dict(
        hidden_states=normal(2, 16, config["in_channels"]), timestep=torch.tensor([0.1, 0.9]),
        guidance=torch.tensor([1.0, 3.5]), encoder_hidden_states=normal(2, 24, config["joint_attention_dim"]),
        pooled_projections=normal(2, config["pooled_projection_dim"]),
        img_ids=torch.tensor([[0.0, i, j] for i in range(4) for j in range(4)]), txt_ids=torch.zeros(24, 3),
    )  # fmt: skip


def dequantised_state(run: runs.Run) -> dict[str, torch.Tensor]:
    """The base as the run holds it, fp32, under the stock model's names."""
    state = {}
    module = run.model.modules[run.family.denoiser]
    for name in run.plan.model.source.build(run.family.denoiser).state_dict():
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner) if owner else module
        layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        value = layer.dequantize(torch.float32) if leaf == "weight" and hasattr(layer, "dequantize") else None
        state[name] = (getattr(layer, leaf) if value is None else value).detach().float().clone()
    return state


@torch.no_grad()
def dense_over_original(run: runs.Run, bench: Workbench, family: str, inputs) -> torch.Tensor:
    """The stock model's output with g (W16 + s B A) in place of each adapted layer's W16: g as trained."""
    model = getattr(stock_pipeline(family, bench.models / family), DENOISER[family])
    for name, layer in run.adapter.layers.items():
        base = layer.get_base_layer().dequantize(torch.float32)
        g = layer.lora_magnitude_vector["default"].weight / layer.current_norm("default")
        g = g.view(-1, *[1] * (base.dim() - 1))
        added = layer.adapted_weight("default") / g - base
        owner = model.get_submodule(name.partition(".")[2])
        owner.weight.data.copy_(g * (owner.weight + added))
    return model(**inputs).sample


def stock_pipeline(family: str, folder):
    from diffusers import FluxPipeline, StableDiffusionXLPipeline

    kind = {"sdxl": StableDiffusionXLPipeline, "flux": FluxPipeline}[family]
    return kind.from_pretrained(folder, torch_dtype=torch.float32)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("family", "kind", "dtype"), CELLS)
def test_exported_file_in_a_stock_pipeline(bench: Workbench, record_property, family, kind, dtype) -> None:
    run = train(bench, family, kind, dtype)
    samples = sorted((bench.tmp / "out" / "samples").rglob("*.png"))
    assert [p.parent.name for p in samples] == ["step-00000000", "step-00000003"]

    pipe = stock_pipeline(family, bench.models / family)
    model = getattr(pipe, DENOISER[family])
    inputs = inputs_for(family, run)
    with torch.no_grad():
        ours = run.model.modules[run.family.denoiser](**inputs).sample
        original_base = model(**inputs).sample
        pipe.load_lora_weights(str(bench.tmp / "out" / "adapters" / "bear.safetensors"))
        over_original = model(**inputs).sample
        # The adapted layers' stock weights sit behind PEFT's base_layer now.
        adapted = {name for name, _ in model.named_parameters() if ".base_layer." in name}
        state = dequantised_state(run)
        renamed = {}
        for name, value in state.items():
            wrapped = f"{name.rpartition('.')[0]}.base_layer.{name.rpartition('.')[2]}"
            renamed[wrapped if wrapped in adapted else name] = value
        missing, unexpected = model.load_state_dict(renamed, strict=False)
        assert not unexpected and all("lora_" in name for name in missing)
        theirs = model(**inputs).sample
    assert relative(theirs, original_base) > 1e-3, "the adapter does nothing"
    if kind == "lora" or dtype == "bf16":
        assert relative(ours, theirs) <= 1e-5
    else:
        # The file is made for the 16-bit weights: its magnitudes are those of g (W16 + s B A), and wrong over the dequantised
        # ones. What it must be over the 16-bit ones, layer by layer: test_low_bit_exports.py.
        assert relative(over_original, dense_over_original(run, bench, family, inputs)) <= 1e-4
    difference = relative(over_original, ours)
    record_property("difference over the original base", difference)
    print(f"{family} {kind} {dtype}: over the original base the output differs by {difference:.2e}")
    if dtype == "bf16":
        assert difference <= 1e-5  # the checkpoint is stored in bf16: base and original base are the same


def comfyui_weight(w, down, up, alpha, dora_scale, released: bool):
    """ComfyUI's weight_decompose (released versions divide by ||W||; corrected, by ||V||), without its eps."""
    v = w + alpha / down.shape[0] * (up.flatten(1) @ down.flatten(1)).view_as(w)
    if dora_scale is None:
        return v
    norm = (w if released else v).flatten(1).norm(dim=1).view(-1, *[1] * (w.dim() - 1))
    return v * dora_scale / norm


@pytest.mark.parametrize(
    ("family", "kind", "convention", "targets"),
    [
        ("sdxl", "lora", "comfyui_released", "partial"),
        ("sdxl", "dora", "comfyui_released", "all"),
        ("flux", "dora", "magnitude", "partial"),
        ("flux", "lora", "comfyui_released", "all"),
        pytest.param("sdxl", "dora", "magnitude", "partial", marks=pytest.mark.slow),
        pytest.param("flux", "dora", "comfyui_released", "partial", marks=pytest.mark.slow),
        pytest.param("flux", "dora", "comfyui_released", "all", marks=pytest.mark.slow),
    ],
)
def test_kohya_file_gives_the_adapted_weights(bench: Workbench, family, kind, convention, targets) -> None:
    """Each kohya module, applied by its reader's formula to the original layout's weight, gives our dense weights."""
    wanted = "all" if targets == "all" else ["*to_q", "*proj_mlp"] if family == "flux" else ["*to_q"]
    config = bench.config(
        family, adapter__type=kind, adapter__targets=wanted, export__dora_scale=convention,
        adapter__rules=[{"component": DENOISER[family], "match": "*to_q", "rank": 3, "alpha": 1.0}],
    )  # fmt: skip
    with built(config) as run:
        move(run, magnitudes=0.1)
        path = run.artifacts().export("bear")["comfyui"]
        file = TensorFile(path)
        denoiser = run.family.denoiser
        seen = set()
        for link in run.family.module_links(denoiser, run.model.configs[denoiser]):
            key = f"lora_unet_{link.original.removesuffix('.weight').replace('.', '_')}"
            if f"{key}.lora_up.weight" not in file.entries:
                continue
            layers = [run.model.modules[denoiser].get_submodule(p.removesuffix(".weight")) for p in link.parts]
            bases = [getattr(layer, "base_layer", layer).dequantize(torch.float32) for layer in layers]
            expected = [
                layer.adapted_weight("default") if hasattr(layer, "adapted_weight") else base
                for layer, base in zip(layers, bases, strict=True)
            ]
            swap = (lambda x: torch.cat(x.chunk(2)[::-1])) if link.op == "swap_halves" else (lambda x: x)
            got = comfyui_weight(
                swap(torch.cat(bases)),
                file.read(f"{key}.lora_down.weight"), file.read(f"{key}.lora_up.weight"),
                file.read(f"{key}.alpha").item(),
                file.read(f"{key}.dora_scale") if kind == "dora" else None,
                convention == "comfyui_released",
            )  # fmt: skip
            assert relative(got, swap(torch.cat(expected))) < 1e-6, key
            seen |= {k for k in file.entries if k.startswith(f"{key}.")}
        assert seen == set(file.entries), sorted(set(file.entries) - seen)[:3]
        args = json.loads(file.metadata["ss_network_args"])
        if kind == "dora":
            assert args["dora_scale"].startswith(convention)


ENCODERS = {"sdxl": ("text_encoder", "text_encoder_2"), "flux": ("text_encoder",)}


def move(run: runs.Run, *, magnitudes: float = 0.2) -> None:
    """As if trained: B and magnitudes of every layer away from where they start."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in run.adapter.named_parameters().items():
            if name.endswith("lora_B.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))
            elif name.endswith("magnitude_vector"):
                parameter.mul_(1 + magnitudes * torch.randn(parameter.shape, generator=g))
    run.adapter.mark_stale()


@pytest.mark.parametrize(
    ("family", "kind"), [("sdxl", "dora"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in
                                             (("sdxl", "lora"), ("flux", "dora")))]
)  # fmt: skip
def test_text_encoder_adapters_load_in_a_stock_pipeline(bench: Workbench, family: str, kind: str) -> None:
    """Magnitudes, too, which transformers leaves out under the keys that PEFT takes them by."""
    rules = [{"component": name, "match": "*", "rank": 2} for name in ENCODERS[family]]
    with built(bench.config(family, adapter__type=kind, adapter__rules=rules)) as run:
        move(run)
        written = run.artifacts().export("bear")
        pipe, ids, ours = stock_pipeline(family, bench.models / family), torch.arange(5, 82)[None], {}
        with torch.no_grad():
            for name in ENCODERS[family]:
                ours[name] = (run.model.modules[name](ids)[0], getattr(pipe, name)(ids)[0])
            pipe.load_lora_weights(str(written["diffusers"]))
            for name, (adapted, before) in ours.items():
                theirs = getattr(pipe, name)(ids)[0]
                assert relative(theirs, before) > 1e-2, f"the adapter on {name} does nothing"
                assert relative(adapted, theirs) <= 1e-5, name
        keys = TensorFile(written["comfyui"]).entries
        for number, name in enumerate(ENCODERS[family], 1):
            stem = f"lora_te{number}_text_model_encoder_layers_0_self_attn_q_proj"
            assert {f"{stem}.lora_down.weight"} | ({f"{stem}.dora_scale"} if kind == "dora" else set()) <= keys.keys(), name


@pytest.mark.slow
def test_an_encoders_magnitudes_load_in_peft_under_both_keys(bench: Workbench) -> None:
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    rules = [{"component": "text_encoder", "match": "*q_proj", "rank": 2}]
    with built(bench.config("sdxl", adapter__type="dora", adapter__rules=rules)) as run:
        move(run)
        file = TensorFile(run.artifacts().export("bear")["diffusers"])
        ids = torch.arange(5, 82)[None]
        with torch.no_grad():
            wanted = run.model.modules["text_encoder"](ids)[0]
        state = {k.removeprefix("text_encoder."): t for k, t in file.read_all().items() if k.startswith("text_encoder.")}
        assert any(key.endswith(".lora_magnitude_vector.weight") for key in state)
        for ending in (".weight", ""):
            named = {k.removesuffix(".weight") + ending if "magnitude" in k else k: t for k, t in state.items()}
            encoder = stock_pipeline("sdxl", bench.models / "sdxl").text_encoder
            kind = LoraConfig(r=2, lora_alpha=2, use_dora=True, target_modules=list({n.split(".lora_")[0] for n in named}))
            inject_adapter_in_model(kind, encoder)
            said = set_peft_model_state_dict(encoder, named)
            assert not said.unexpected_keys
            with torch.no_grad():
                assert relative(encoder(ids)[0], wanted) <= 1e-5, ending


@pytest.mark.slow
def test_what_diffusers_does_not_load_is_said(bench: Workbench, capsys) -> None:
    """An encoder's MLP alone: its own keys raise there, as the note says; kohya's give the LoRA."""
    rules = [{"component": "text_encoder", "match": "*.fc1", "rank": 2}]
    with built(bench.config("sdxl", adapter__rules=rules, run__max_steps=1)) as run:
        move(run)
        assert train_built(run)
        assert (
            "note: diffusers does not load the adapter of text_encoder: none of its layers is a q_proj"
            in capsys.readouterr().out
        )
        ids = torch.arange(5, 82)[None]
        with torch.no_grad():
            wanted = run.model.modules["text_encoder"](ids)[0]
    own = bench.tmp / "out" / "adapters"
    with pytest.raises(ValueError, match="Could not automatically infer state dict type"):
        stock_pipeline("sdxl", bench.models / "sdxl").load_lora_weights(str(own / "bear.safetensors"))
    pipe = stock_pipeline("sdxl", bench.models / "sdxl")
    pipe.load_lora_weights(str(own / "bear_comfyui.safetensors"))
    with torch.no_grad():
        assert relative(pipe.text_encoder(ids)[0], wanted) <= 1e-5
    checkpoint = bench.tmp / "out" / "checkpoints" / "step-00000001"
    assert script.main(["export", str(checkpoint), str(bench.tmp / "made")]) == 0
    assert "note: diffusers does not load the adapter of text_encoder" in capsys.readouterr().out

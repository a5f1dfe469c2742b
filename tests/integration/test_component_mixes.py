"""Components that are stored and compute each in their own way: from a config to adapter files."""

from __future__ import annotations

import json

import pytest
import torch

from tests.harness import DENOISER, Workbench, built, metrics_of
from tests.integration.test_named_faults import checkpoint, gradients, jitter, launch, prepared, small, steps
from trainer.base.tensorfile import TensorFile
from trainer.plan.run_plan import open_source, resolve


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """One cache for all tests here; its entries are found by what went into them."""
    return str(tmp_path_factory.mktemp("cache"))


def trains(bench: Workbench, cache: str, family: str, **overrides) -> dict[str, set[str]]:
    """A run of two steps, in which every B moves. Returns the formats recorded, by component."""
    tree = small(
        bench, cache, family,
        **{"run__max_steps": 2, "adapter__type": "dora", "optimizer__lr": 1e-2, "precision__compute": "bf16"} | overrides,
    )  # fmt: skip
    assert launch(bench, tree) == 0
    made = TensorFile(bench.tmp / "out" / "adapters" / "bear.safetensors").read_all()
    moved = [tensor for name, tensor in made.items() if "lora_B" in name]
    assert moved and all(torch.isfinite(tensor).all() and tensor.norm() > 0 for tensor in moved)
    found: dict[str, set[str]] = {}
    for name, layer in json.loads((checkpoint(bench.tmp / "out", 2) / "quantization.json").read_text()).items():
        if layer.get("format") not in ("fp32", "bf16", "fp16", None):
            found.setdefault(name.partition(".")[0], set()).add(f"{layer['format']} {layer['backend']}")
    return found


def start_print(capsys) -> set[str]:
    """The lines that a run prints, with single spaces."""
    return {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    ("dtype", "backend", "cached"),
    [("int8", "quanto", False), pytest.param("nf4", "bitsandbytes", True, marks=pytest.mark.slow)],
)
def test_flux_with_fp32_clip_quantised_t5_float8_transformer(bench: Workbench, cache, capsys, dtype, backend, cached) -> None:
    components = {
        "text_encoder": {"dtype": "fp32"},
        "text_encoder_2": {"dtype": dtype, "backend": backend},
        "transformer": {"dtype": "fp8_e4m3"},
        "vae": {"dtype": "fp32"},
    }
    found = trains(bench, cache, "flux", model__components=components, data__cache_text=cached)
    # With its captions cached, T5 has left memory before the base is recorded.
    live = {} if cached else {"text_encoder_2": {f"{dtype} {backend}"}}
    assert found == {"transformer": {"fp8_e4m3 native"}} | live
    assert start_print(capsys) >= {
        "text_encoder stored fp32 computes float32",
        f"text_encoder_2 stored {dtype} ({backend}) computes bfloat16",
        "transformer stored fp8_e4m3 computes bfloat16",
        "vae stored fp32 computes float32",
    }


@pytest.mark.slow
def test_sdxl_with_an_int8_encoder_in_fp16_beside_a_float8_unet_in_bf16(bench: Workbench, cache, capsys) -> None:
    components = {
        "text_encoder": {"dtype": "fp32"},
        "text_encoder_2": {"dtype": "int8", "compute": "fp16"},
        "unet": {"dtype": "fp8_e4m3", "compute": "bf16"},
    }
    found = trains(bench, cache, "sdxl", model__components=components, data__cache_text=False)
    assert found == {"unet": {"fp8_e4m3 native"}, "text_encoder_2": {"int8 quanto"}}
    assert start_print(capsys) >= {
        "text_encoder stored fp32 computes float32",
        "text_encoder_2 stored int8 (quanto) computes float16",
        "unet stored fp8_e4m3 computes bfloat16",
    }
    # No gradient passes through the encoder: its fp16 is no reason to scale the loss.
    assert not any("loss_scale" in entry for entry in metrics_of(bench.tmp / "out"))


@pytest.mark.parametrize(
    ("family", "encoder", "match", "compute"),
    [
        ("sdxl", "text_encoder", "*self_attn.q_proj", "bf16"),
        pytest.param("sdxl", "text_encoder_2", "*.fc1", "fp16", marks=pytest.mark.slow),
        pytest.param("flux", "text_encoder_2", "*SelfAttention.v", "bf16", marks=pytest.mark.slow),
    ],
)
def test_an_adapted_int8_encoder_trains_beside_an_nf4_denoiser(
    bench: Workbench, cache, family, encoder, match, compute
) -> None:
    """Gradients pass through the quantised denoiser into the quantised encoder, and both adapters move."""
    with prepared(
        bench, cache, family, model__components={encoder: {"dtype": "int8"}, DENOISER[family]: {"dtype": "nf4"}},
        adapter__type="dora", adapter__rules=[{"component": encoder, "match": match}], precision__compute=compute,
        optimizer__lr=1e-2, **({"precision__loss_scale": 256.0} if compute == "fp16" else {}),
    ) as run:  # fmt: skip
        jitter(run)
        named = run.adapter.named_parameters()
        assert {name.partition(".")[0] for name in named} == {encoder, DENOISER[family]}
        stored = {name.partition(".")[0]: layer.get_base_layer().format.name for name, layer in run.adapter.layers.items()}
        assert stored == {encoder: "int8 (quanto)", DENOISER[family]: "nf4 (bitsandbytes)"}
        batch = run.reader[next(run.updates())[0]]
        assert batch.conditioning is None, "captions are encoded live where an encoder is trained"
        for name, gradient in gradients(run, batch).items():
            assert torch.isfinite(gradient).all() and gradient.norm() > 0, name
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        assert all(step.updated for step in steps(run, 2))
        for name, parameter in named.items():
            assert (parameter - before[name]).norm() > 1e-3 * before[name].norm(), name


CAPTION = "a photo of sks plush bear on a beach"


def stock_encodings(bench: Workbench, family: str, ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fp64, from transformers' own modules: by encoder, what the denoiser is told of it."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

    folder = bench.models / family
    second = CLIPTextModelWithProjection if family == "sdxl" else T5EncoderModel
    given = {}
    with torch.no_grad():
        for name, cls in (("text_encoder", CLIPTextModel), ("text_encoder_2", second)):
            stock = cls.from_pretrained(folder / name, torch_dtype=torch.float64)
            output = stock(ids[name], output_hidden_states=True)
            if family == "sdxl":
                given[name] = output.hidden_states[-2]
            else:
                given[name] = output.pooler_output if name == "text_encoder" else output.last_hidden_state
    return given


@pytest.mark.parametrize("family", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_an_fp32_encoder_beside_a_float8_denoiser_computes_in_fp32(bench: Workbench, cache, family) -> None:
    """It computed in `precision.compute`: its encodings were those of an encoder stored as bf16, bit for bit."""
    encoders = ("text_encoder", "text_encoder_2")

    def encodings(dtype: str, **more) -> dict[str, torch.Tensor]:
        components = {name: {"dtype": dtype} | more for name in encoders} | {DENOISER[family]: {"dtype": "fp8_e4m3"}}
        with prepared(
            bench, cache, family, model__components=components, precision__compute="bf16", data__cache_text=False,
            run__output_dir=str(bench.tmp / f"{dtype}{len(more)}"),
        ) as run, torch.no_grad():  # fmt: skip
            assert run.plan.model.storage[DENOISER[family]].compute == torch.bfloat16
            found = run.family.encode_prompts(run.model, [CAPTION])
            for name in encoders:
                tokenizer = run.model.tokenizers[name.replace("text_encoder", "tokenizer")]
                length = found.sequence.shape[1] if "T5" in type(tokenizer).__name__ else 77
                ids[name] = tokenizer(
                    [CAPTION], padding="max_length", max_length=length, truncation=True, return_tensors="pt"
                ).input_ids
        if family == "flux":
            return {"text_encoder": found.pooled, "text_encoder_2": found.sequence}
        widths = [run.model.configs[name]["hidden_size"] for name in encoders]
        return dict(zip(encoders, found.sequence.split(widths, dim=-1), strict=True))

    ids: dict[str, torch.Tensor] = {}
    exact, rounded, asked = encodings("fp32"), encodings("bf16"), encodings("fp32", compute="bf16")
    stock = stock_encodings(bench, family, ids)
    for name in encoders:
        size = stock[name].norm()

        def error(given: dict[str, torch.Tensor], name: str = name, size: torch.Tensor = size) -> float:
            return float((given[name].double() - stock[name]).norm() / size)

        # A few dozen roundings in a row, each of 2^-24 or of 2^-9.
        assert exact[name].dtype == torch.float32 and error(exact) < 32 * 2**-24
        assert rounded[name].dtype == torch.bfloat16 and 2**-10 < error(rounded) < 32 * 2**-9
        assert asked[name].dtype == torch.bfloat16 and torch.equal(asked[name], rounded[name])


@pytest.mark.parametrize(
    ("vae", "computes"),
    [({}, "fp32"), ({"dtype": "fp32"}, "fp32"), ({"dtype": "bf16"}, "bf16"), ({"dtype": "fp16", "compute": "fp32"}, "fp32")],
)
def test_a_vae_computes_in_fp32_where_it_is_stored_so(bench: Workbench, vae, computes) -> None:
    config = bench.config(model__components={"vae": vae, "unet": {"dtype": "fp32"}}, precision__compute="bf16")
    components = resolve(config, open_source(config)).model.components
    assert components["vae"].compute == computes
    assert components["unet"].compute == "bf16", "the denoiser follows precision.compute however it is stored"


ENCODER_RULE = [{"component": "text_encoder", "match": "*self_attn.q_proj"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "fp16", "rules", "scaled"),
    [("bf16", "transformer", [], True), ("bf16", "text_encoder", ENCODER_RULE, True), ("fp16", "text_encoder", [], False)],
    ids=["denoiser", "adapted encoder", "all but the denoiser"],
)
def test_the_loss_is_scaled_where_a_gradient_passes_through_fp16(
    bench: Workbench, cache, precision, fp16, rules, scaled
) -> None:
    """Whatever `precision.compute` says: it is only the default of the components."""
    components = {name: {"compute": "bf16"} for name in ("transformer", "text_encoder", "text_encoder_2")}
    components[fp16] = {"compute": "fp16"}
    if precision == "fp16":
        del components["text_encoder_2"]
    with prepared(
        bench, cache, "flux", model__components=components, precision__compute=precision, adapter__rules=rules,
        precision__loss_scale=2.0**24,
    ) as run:  # fmt: skip
        assert run.step.scaler.is_enabled() == scaled
        (step,) = steps(run, 1)
        # 2^24 is more than fp16 can carry: it overflows, and falls.
        assert step.updated != scaled and run.step.scaler.get_scale() == (2.0**23 if scaled else 1.0)


@pytest.mark.parametrize("dtype", ["nf4", "fp8_e4m3", pytest.param("int2", marks=pytest.mark.slow)])
def test_a_fresh_adapter_leaves_a_quantised_t5_as_it_is(bench: Workbench, cache, dtype: str) -> None:
    """T5 casts what `wo` gets to `wo.weight.dtype`: under an adapter that was the codes', and rounded to whole numbers."""
    encoded = []
    for rules in ([], [{"component": "text_encoder_2", "match": "*"}]):
        config = bench.config(
            "flux", model__components={"text_encoder_2": {"dtype": dtype}}, adapter__rules=rules,
            data__cache_text=False, data__cache_dir=cache, run__output_dir=str(bench.tmp / f"out-{len(rules)}"),
        )  # fmt: skip
        with built(config) as run, torch.no_grad():
            assert any("text_encoder_2" in name for name in run.adapter.layers) == bool(rules)
            encoded.append(run.family.encode_prompts(run.model, ["a photo of a bear"]).sequence)
    assert torch.equal(*encoded)

"""One step's loss and every adapter gradient against a computation written from the papers' formulas, in fp64.

The oracle shares no code with the trainer but the keyed draws: images through Pillow, text and latents through the stock
libraries, time ids, packing, ids, shift and targets by hand, adapters as dense weights g * (W + s B A).
"""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from torch.func import functional_call

from tests.harness import DENOISER, PHOTOS, Workbench, built
from trainer.base import draws
from trainer.base.types import Batch
from trainer.engine.step import StepResult
from trainer.run.run import Run
from workbench.replay.exact import computing_exactly
from workbench.replay.judged import Judge, RepeatedStep
from workbench.replay.rounding import InFp64

SEED = 7
# fp32 keeps 24 bits; rounding errors of some hundred layers add up like a random walk, and gradients pass each twice.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-4
# Of the run's step in fp64, over the same latents: what follows from the times has 24 bits.
EXACT = 1e-6


# Choices of an objective that the oracle knows, beside the plain one.
CHOICES = {"sdxl": {"weighting": "debiased", "noise_offset": 0.2}, "flux": {"shift": 2.0}}
COMMON = {
    "loss": "huber", "huber_c": 0.3, "huber_schedule": "snr", "timesteps": "power", "power": 2.0, "input_perturbation": 0.1,
    "t_range": [0.25, 1.0],
}  # fmt: skip


def read_photo(name: str, width: int, height: int) -> torch.Tensor:
    """[1, 3, H, W] in [-1, 1]: covered, centre-cropped."""
    image = Image.open(PHOTOS / name).convert("RGB")
    assert (image.width * height) == (image.height * width), "the oracle's photos have the bucket's aspect exactly"
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3)
    return (data.permute(2, 0, 1).double() / 127.5 - 1)[None]


def oracle_loss(
    family: str, folder, photos: list[str], adapter: dict, scaling: dict, dora: bool, latents: torch.Tensor, chosen: bool,
    encoded: Batch | None = None,
):  # fmt: skip
    """(loss, gradients by the trainer's parameter names), fp64. latents: the weight of each, [B, 1, h, w].

    chosen: with CHOICES and COMMON. encoded: photos and captions as the trainer encoded them; Flux's time in fp32, then.
    """
    from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
    from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

    captions = [(PHOTOS / p).with_suffix(".txt").read_text().strip() for p in photos]
    vae = AutoencoderKL.from_pretrained(folder / "vae").double()
    pixels = torch.cat([read_photo(p, 64, 64) for p in photos])
    z = vae.encode(pixels).latent_dist.mean
    noise = torch.stack([draws.normal(z.shape[1:], SEED, "noise", 0, f"0/{p}", 0) for p in photos]).double()
    u = [draws.uniform(SEED, "timestep", 0, f"0/{p}", 0) for p in photos]
    seen, weight, sigma = noise, 1.0, None
    if chosen:
        low = 0.25 if family == "sdxl" else 0.25 / (2 - 0.25)  # before the shift of 2
        u = [math.sqrt(low**2 + value * (1 - low**2)) for value in u]  # F(t) = t^2
        if family == "sdxl":
            lift = [draws.normal((z.shape[1], 1, 1), SEED, "noise_offset", 0, f"0/{p}", 0) for p in photos]
            noise = noise + 0.2 * torch.stack(lift).double()
        xi = torch.stack([draws.normal(noise.shape[1:], SEED, "input_perturbation", 0, f"0/{p}", 0) for p in photos])
        seen = noise + 0.1 * xi.double()
    ids = AutoTokenizer.from_pretrained(folder / "tokenizer")(
        captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    ).input_ids
    kind = {"sdxl": UNet2DConditionModel, "flux": FluxTransformer2DModel}[family]
    model = kind.from_pretrained(folder / DENOISER[family]).double().requires_grad_(False)

    leaves = {name: t.detach().double().requires_grad_() for name, t in adapter.items()}
    weights = {}
    for layer, s in scaling.items():
        w = model.get_submodule(layer).weight
        full = f"{DENOISER[family]}.{layer}"
        v = w + s * leaves[f"{full}.lora_B.weight"] @ leaves[f"{full}.lora_A.weight"]
        if dora:
            v = v * (leaves[f"{full}.lora_magnitude_vector"] / v.detach().norm(dim=1))[:, None]
        weights[f"{layer}.weight"] = v

    if family == "sdxl":
        ids_2 = AutoTokenizer.from_pretrained(folder / "tokenizer_2")(
            captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        ).input_ids
        one = CLIPTextModel.from_pretrained(folder / "text_encoder").double()
        two = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2").double()
        out_1, out_2 = one(ids, output_hidden_states=True), two(ids_2, output_hidden_states=True)
        sequence = torch.cat([out_1.hidden_states[-2], out_2.hidden_states[-2]], -1)
        x0, pooled = z * 0.13025, out_2.text_embeds
        if encoded is not None:
            x0, sequence, pooled = in_fp64(encoded)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        abar = torch.cumprod(1 - betas, 0)
        t = torch.tensor([int(value * 1000) for value in u])
        a = abar[t].view(-1, 1, 1, 1)
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * seen
        if chosen:
            sigma = ((1 - a) / a).sqrt()
            weight = sigma  # debiased: 1 / sqrt(SNR)
        sizes = [Image.open(PHOTOS / p).size for p in photos]
        time_ids = torch.tensor([[h, w, 0, 0, 64, 64] for w, h in sizes], dtype=torch.float64)
        added = {"text_embeds": pooled, "time_ids": time_ids}
        inputs = {"encoder_hidden_states": sequence, "added_cond_kwargs": added}
        with InFp64():
            prediction = functional_call(model, weights, (x_t, t), inputs).sample
        target = noise
    else:
        t5 = AutoTokenizer.from_pretrained(folder / "tokenizer_2")
        ids_2 = t5(captions, padding="max_length", max_length=512, truncation=True, return_tensors="pt").input_ids
        pooled = CLIPTextModel.from_pretrained(folder / "text_encoder").double()(ids).pooler_output
        sequence = T5EncoderModel.from_pretrained(folder / "text_encoder_2").double()(ids_2)[0]
        x0 = (z - vae.config.shift_factor) * vae.config.scaling_factor
        if encoded is not None:
            x0, sequence, pooled = in_fp64(encoded)
        # logit-normal, then the shift for (64 / 16)^2 = 16 tokens
        shift = math.exp(0.5 + 0.65 * (16 - 256) / 3840)
        plain = [torch.sigmoid(torch.special.ndtri(torch.tensor(value, dtype=torch.float64))) for value in u]
        if chosen:
            shift, plain = 2.0, [torch.tensor(value, dtype=torch.float64) for value in u]
        t = torch.stack([shift * value / (1 + (shift - 1) * value) for value in plain])
        if encoded is not None:
            t = t.float().double()  # as the run has it; its sines are of 1000 t
        x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * seen
        sigma = (t / (1 - t)).view(-1, 1, 1, 1)
        b, c, h, w = x_t.shape
        # one token per 2 x 2 patch, channels first within it
        tokens = torch.stack(
            [x_t[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(b, -1) for i in range(h // 2) for j in range(w // 2)],
            dim=1,
        )
        img_ids = torch.tensor([[0.0, i, j] for i in range(h // 2) for j in range(w // 2)], dtype=torch.float64)
        inputs = {
            "hidden_states": tokens, "timestep": t, "guidance": torch.ones(b, dtype=torch.float64),
            "encoder_hidden_states": sequence, "pooled_projections": pooled, "img_ids": img_ids,
            "txt_ids": torch.zeros(sequence.shape[1], 3, dtype=torch.float64),
        }  # fmt: skip
        with InFp64():
            predicted = functional_call(model, weights, (), inputs).sample
        prediction = torch.empty_like(x_t)
        for index, (i, j) in enumerate((i, j) for i in range(h // 2) for j in range(w // 2)):
            prediction[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = predicted[:, index].view(b, c, 2, 2)
        target = noise - x0
    errors = (prediction - target).square()
    if chosen:
        c = (1 - 0.3) / (1 + sigma) ** 2 + 0.3
        errors = 2 * c * ((errors + c**2).sqrt() - c)
    loss = (weight * latents * errors).mean()
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items()}


def in_fp64(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(latents, sequence, pooled)."""
    told = batch.conditioning
    return batch.latents.double(), told.sequence.double(), told.pooled.double()


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize(
    ("kind", "masked", "chosen"),
    [("lora", False, False), ("dora", False, False), ("dora", True, False), ("lora", True, True)],
)
def test_loss_and_gradients_equal_the_papers_formulas(
    bench: Workbench, family: str, kind: str, masked: bool, chosen: bool
) -> None:
    photos = ["01.jpg"]  # square, so that no crop or bucket rule enters
    data = bench.tmp / "photos"
    data.mkdir()
    for p in photos:
        for suffix in (".jpg", ".txt"):
            source = (PHOTOS / p).with_suffix(suffix)
            (data / source.name).write_bytes(source.read_bytes())
    source, latents = {"path": str(data)}, torch.ones(1, 1, 8, 8, dtype=torch.float64)
    if masked:
        noise = torch.randint(0, 256, (768, 768), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        noise[:300, :400] = 0
        Image.fromarray(noise.numpy()).save(data / "01.mask.png")
        source |= {"masks": "files", "unmasked_weight": 0.25, "loss_weight": 1.5}
        mask = noise.double().view(8, 96, 8, 96).mean((1, 3)) / 255  # a latent is 96 x 96 pixels of the photo
        latents = 1.5 * (mask + 0.25 * (1 - mask))[None, None]
    denoiser = DENOISER[family]
    components = {name: {"dtype": "fp32"} for name in (denoiser, "text_encoder", "text_encoder_2", "vae")}
    config = bench.config(
        family,
        model__components=components,
        adapter__type=kind,
        adapter__targets="attention+mlp",
        adapter__rules=[{"component": denoiser, "match": "*to_k", "rank": 3, "alpha": 5.0}],
        data__sources=[source],
        data__caption_dropout=0.0,
        objective=CHOICES[family] | COMMON if chosen else {},
        run__seed=SEED,
    )
    with built(config) as run:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in run.adapter.named_parameters().items():
                jitter = torch.randn(parameter.shape, generator=generator)
                if name.endswith("lora_B.weight"):
                    parameter.copy_(0.05 * jitter)
                elif name.endswith("magnitude_vector"):
                    parameter.mul_(1 + 0.2 * jitter)
        run.adapter.mark_stale()
        batch = run.reader[next(run.updates())[0]]
        losses = run.step.losses(batch)
        losses.mean().backward()
        scaling = {}
        for layer in run.adapter.layers:
            rank, alpha = (3, 5.0) if layer.endswith("to_k") else (4, 2.0)
            scaling[layer.removeprefix(f"{denoiser}.")] = alpha / rank
        loss, gradients = oracle_loss(
            family, bench.models / family, photos, run.adapter.state_dict(), scaling, kind == "dora", latents, chosen
        )
        assert abs(losses.mean().item() / loss - 1) < LOSS_TOLERANCE
        worst = {}
        for name, parameter in run.adapter.named_parameters().items():
            expected = gradients[name]
            assert expected.norm() > 0, f"{name} has no gradient in the oracle"
            worst[name] = float((parameter.grad - expected).norm() / expected.norm())
        name = max(worst, key=worst.get)
        assert worst[name] < GRADIENT_TOLERANCE, f"{name}: {worst[name]:.2e}"
        given = run.adapter.state_dict(), scaling, kind == "dora", latents, chosen
        check_exact(run, batch, *oracle_loss(family, bench.models / family, photos, *given, batch))


def check_exact(run: Run, batch: Batch, loss: float, gradients: dict) -> None:
    """The run's own step in fp64 (`scripts/replay.py`) is that of the formulas, over what the run encoded."""
    training = run.adapter.training(SEED)
    made = RepeatedStep(1, StepResult(None, None, (), True, 1.0), {}, [batch], batch.occurrences, {})
    with computing_exactly(run.components):
        exact = Judge(run.step.losses, run.adapter, training, torch.float32).values(made, None)
    assert abs(exact.loss / loss - 1) < EXACT
    for name, expected in gradients.items():
        assert float((exact.gradients[name] - expected).norm() / expected.norm()) < EXACT, name

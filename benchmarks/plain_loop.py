"""The alternative we measure ourselves against: a plain diffusers + PEFT training loop for an SDXL LoRA or DoRA.

Written as a competent person writes it in an afternoon, not as a strawman: latents and text embeddings are encoded once
and kept in memory, the encoders are dropped, the base is bf16 under autocast with fp32 adapter weights, the optimiser
sees only those. It has no config, resume, checks, buckets (square centre crops), validation or metrics. Nothing of the
trainer is imported here. benchmarks/bench_cli.py runs it and reads the lines that begin with EVENT.
"""
# ruff: noqa: E402 - the first line is printed before the imports, whose time counts

import time

print(f"EVENT process_start {time.time():.6f}", flush=True)

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TARGETS = {"attention": ATTENTION, "attention+mlp": [*ATTENTION, "ff.net.0.proj", "ff.net.2"]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="an SDXL checkpoint as a diffusers folder")
    parser.add_argument("--data", type=Path, required=True, help="a folder of images with .txt captions beside them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--type", choices=("lora", "dora"), default="lora")
    parser.add_argument("--targets", choices=sorted(TARGETS), default="attention+mlp")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_image(path: Path, resolution: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """(pixels in [-1, 1] of shape [3, R, R], SDXL's six time ids: original size, crop corner, target size)."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("RGB")
    width, height = image.size
    scale = resolution / min(width, height)
    image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
    image = image.crop((left, top, left + resolution, top + resolution))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    return pixels, (height, width, top, left, resolution, resolution)


@torch.no_grad()
def encode_prompt(caption: str, tokenizers, text_encoders, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence [77, 2048 in the real model], pooled [1280]) of one caption."""
    hidden = []
    for tokenizer, text_encoder in zip(tokenizers, text_encoders, strict=True):
        ids = tokenizer(
            caption, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        ).input_ids
        output = text_encoder(ids.to(device), output_hidden_states=True)
        hidden.append(output.hidden_states[-2])
        pooled = output[0]  # of the second encoder, in the end
    return torch.cat(hidden, dim=-1)[0], pooled[0]


class Cached(Dataset):
    """Every sample encoded, in memory."""

    def __init__(self, samples: list[dict[str, torch.Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def encode_dataset(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Cached:
    """Encode every image and caption; the encoders are freed when this returns."""
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae").to(device)  # fp32: SDXL's VAE overflows in fp16
    text_encoders = [
        CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder", dtype=dtype).to(device),
        CLIPTextModelWithProjection.from_pretrained(args.model, subfolder="text_encoder_2", dtype=dtype).to(device),
    ]
    tokenizers = [CLIPTokenizer.from_pretrained(args.model, subfolder=name) for name in ("tokenizer", "tokenizer_2")]
    files = sorted(path for path in args.data.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    samples = []
    for path in files:
        pixels, time_ids = read_image(path, args.resolution)
        with torch.no_grad():
            latents = vae.encode(pixels[None].to(device)).latent_dist.mode()[0] * vae.config.scaling_factor
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        sequence, pooled = encode_prompt(caption, tokenizers, text_encoders, device)
        samples.append(
            {
                "latents": latents.to(dtype).cpu(),
                "sequence": sequence.cpu(),
                "pooled": pooled.cpu(),
                "time_ids": torch.tensor(time_ids, dtype=torch.float32),
            }
        )
    return Cached(samples)


def forever(loader: DataLoader):
    while True:
        yield from loader


def main() -> None:
    args = parse_args()
    precision = "no" if args.dtype == "fp32" else args.dtype
    accelerator = Accelerator(mixed_precision=precision)
    dtype, device = DTYPES[args.dtype], accelerator.device
    set_seed(args.seed)

    dataset = encode_dataset(args, device, dtype)
    scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet", torch_dtype=dtype).to(device)
    unet.requires_grad_(False)
    unet.add_adapter(
        LoraConfig(
            r=args.rank,
            lora_alpha=args.rank,
            target_modules=TARGETS[args.targets],
            use_dora=args.type == "dora",
            init_lora_weights=True,
        )
    )
    cast_training_params(unet, dtype=torch.float32)
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]

    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.01)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    unet.train()

    progress = tqdm(range(1, args.steps + 1), disable=not accelerator.is_local_main_process)
    images = 0
    for step, batch in zip(progress, forever(loader), strict=False):
        latents = batch["latents"]
        images += len(latents)
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),), device=latents.device)
        noised = scheduler.add_noise(latents, noise, timesteps)
        conditioning = {"text_embeds": batch["pooled"], "time_ids": batch["time_ids"]}
        predicted = unet(
            noised, timesteps, batch["sequence"], added_cond_kwargs=conditioning, return_dict=False
        )[0]  # fmt: skip
        loss = F.mse_loss(predicted.float(), noise.float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if step in (1, args.steps):
            print(f"EVENT step {step} {time.time():.6f}", flush=True)

    unet = accelerator.unwrap_model(unet)
    StableDiffusionXLPipeline.save_lora_weights(
        args.out, unet_lora_layers=convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
    )
    print(f"EVENT saved {time.time():.6f}", flush=True)
    print(f"EVENT images {images}", flush=True)


if __name__ == "__main__":
    main()

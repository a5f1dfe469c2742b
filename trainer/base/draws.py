"""Keyed random numbers: every draw is a pure function of (seed, purpose, key), made on the CPU. It is the same on every
device, for every batch size, worker and process count, and in a resumed run.

Purposes in use, by key:
(epoch, sample, repeat), one appearance of a training image: "order", "flip", "image_variant", "caption_dropout",
"caption", "timestep", "stratum", "noise", "noise_offset", "noise_ratios", "input_perturbation"; with level: "noise_level".
(photo, variant number), a caption: "tag_dropout", "tag_order"; with the place in the text: "wildcard".
(sample, variant number, axis), a photo at one size: "crop_jitter" (zoom, right, down), "colour_jitter".
(photo digest, draw number), measurements: "held_out_time", "held_out_noise".
(module name): "init". (step, index of the micro-batch): "dropout"; with the layer name: "layer_dropout".
(draw number): "audit_probe".
"""

import hashlib
import json
import struct

import torch


def _text(seed: int, purpose: str, key: tuple[int | str, ...]) -> bytes:
    """The JSON list [seed, purpose, *key], in ASCII; it keeps 1 and "1" apart."""
    parts = [seed, purpose, *key]
    # bool and NumPy integers would be encoded differently from the equal int.
    assert all(type(part) in (int, str) for part in parts), parts
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _bits(seed: int, purpose: str, key: tuple[int | str, ...]) -> int:
    """64 bits of BLAKE2b over the key's text."""
    return int.from_bytes(hashlib.blake2b(_text(seed, purpose, key), digest_size=8).digest(), "big")


def generator(seed: int, purpose: str, *key: int | str) -> torch.Generator:
    """A fresh CPU generator, seeded with 63 bits of the hash. torch's (MT19937) keeps the low 32 bits of its seed: among
    100,000 noise draws about one pair shares a stream, which no training notices. `uniform` uses the hash itself."""
    return torch.Generator(device="cpu").manual_seed(_bits(seed, purpose, key) >> 1)


def uniform(seed: int, purpose: str, *key: int | str) -> float:
    """A float64 in the open interval (0, 1), safe for a logit or logarithm while it stays float64."""
    return _open_unit(_bits(seed, purpose, key))


def uniforms(count: int, seed: int, purpose: str, *key: int | str) -> list[float]:
    """`count` numbers like `uniform`'s from one SHAKE-128 hash. A smaller count gives a prefix of a larger one."""
    stream = hashlib.shake_128(_text(seed, purpose, key)).digest(8 * count)
    return [_open_unit(bits) for (bits,) in struct.iter_unpack(">Q", stream)]


def _open_unit(bits: int) -> float:
    # 52 bits plus a half fit float64's 53-bit significand exactly; one bit more could round up to 1.0.
    return ((bits >> 12) + 0.5) * 2.0**-52


def normal(shape: tuple[int, ...] | torch.Size, seed: int, purpose: str, *key: int | str) -> torch.Tensor:
    """Standard normal fp32 values of the given shape, on the CPU."""
    return torch.randn(shape, generator=generator(seed, purpose, *key), dtype=torch.float32)

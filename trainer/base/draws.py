"""Keyed randomness: every draw is a pure function of (seed, purpose, key), made on the CPU: the same on every device, for
every batch size, worker count and process count, and in a resumed run.

Purposes in use, by their key:
(epoch, sample, repeat), of one appearance of a training image: "order", "flip", "image_variant", "caption_dropout",
"caption", "timestep", "stratum", "noise", "noise_offset", "noise_ratios", "input_perturbation"; "noise_level" has the level
as a fourth.
(photo, the variant's number), of a caption: "tag_dropout", "tag_order"; "wildcard" has its place in the text as a third.
(sample, the variant's number, axis), of a photo at one size: "crop_jitter" (zoom, right, down), "colour_jitter".
(a photo's digest, the draw's number), of what is only measured: "held_out_time", "held_out_noise".
(the module's name): "init". (step, the micro-batch's place in the update): "dropout"; with the layer's name as a third:
"layer_dropout". (the draw's number, among all): "audit_probe".
"""

import hashlib
import json
import struct

import torch


def _text(seed: int, purpose: str, key: tuple[int | str, ...]) -> bytes:
    """The JSON list [seed, purpose, *key], which is ASCII and keeps 1 and "1" apart."""
    parts = [seed, purpose, *key]
    # bool and NumPy integers would be encoded differently from the int they equal.
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
    """A float64 in the open interval (0, 1), safe for a logit or a logarithm as long as it stays float64."""
    return _open_unit(_bits(seed, purpose, key))


def uniforms(count: int, seed: int, purpose: str, *key: int | str) -> list[float]:
    """`count` of such numbers from one hash, SHAKE-128. Fewer of the same key are the first of more."""
    stream = hashlib.shake_128(_text(seed, purpose, key)).digest(8 * count)
    return [_open_unit(bits) for (bits,) in struct.iter_unpack(">Q", stream)]


def _open_unit(bits: int) -> float:
    # 52 bits plus a half fit float64's 53-bit significand exactly; one bit more could round up to 1.0.
    return ((bits >> 12) + 0.5) * 2.0**-52


def normal(shape: tuple[int, ...] | torch.Size, seed: int, purpose: str, *key: int | str) -> torch.Tensor:
    """Standard normal fp32 values of the given shape, on the CPU."""
    return torch.randn(shape, generator=generator(seed, purpose, *key), dtype=torch.float32)

"""Keyed randomness: every draw is a pure function of (seed, purpose, key), made on the CPU.

There is no generator to advance, so nothing to save and nothing to lose: a draw is the same on every device, for every
batch size, worker count and process count, and in a resumed run.

Purposes in use: "order", "flip", "caption_dropout", "timestep", "noise", "init". A draw made for one appearance of a
training image has the key (epoch, sample, repeat); "init" has the module's name.
"""

import hashlib
import json

import torch


def _bits(seed: int, purpose: str, key: tuple[int | str, ...]) -> int:
    """64 bits of BLAKE2b over the JSON list [seed, purpose, *key], which is ASCII and keeps 1 and "1" apart."""
    parts = [seed, purpose, *key]
    # bool and NumPy integers would be encoded differently from the int they equal.
    assert all(type(part) in (int, str) for part in parts), parts
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big")


def generator(seed: int, purpose: str, *key: int | str) -> torch.Generator:
    """A fresh CPU generator, seeded with 63 bits of the hash.

    torch's CPU generator (MT19937) keeps only the low 32 bits of its seed, so two keys share a stream with probability
    2**-32; among 100,000 noise draws about one pair does, which no training notices. `uniform` uses the hash itself.
    """
    return torch.Generator(device="cpu").manual_seed(_bits(seed, purpose, key) >> 1)


def uniform(seed: int, purpose: str, *key: int | str) -> float:
    """A float64 in the open interval (0, 1), safe for a logit or a logarithm as long as it stays float64."""
    # 52 bits plus a half fit float64's 53-bit significand exactly; one bit more could round up to 1.0.
    return ((_bits(seed, purpose, key) >> 12) + 0.5) * 2.0**-52


def normal(shape: tuple[int, ...] | torch.Size, seed: int, purpose: str, *key: int | str) -> torch.Tensor:
    """Standard normal fp32 values of the given shape, on the CPU."""
    return torch.randn(shape, generator=generator(seed, purpose, *key), dtype=torch.float32)

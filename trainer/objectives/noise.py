"""The noise of a sample, and the noise that the model sees. Each draw is a pure function of (seed, purpose, key), on the CPU.

noise_offset (Guttenberg 2023, "Diffusion with Offset Noise"): noise + offset * z, one standard normal z for each channel.
multi-resolution noise (Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training", as sd-scripts has it):
  noise + sum over i of discount^i * (noise of size / r_i^i, scaled up bilinearly), r_i uniform in (2, 4), i = 0, 1, ...
  until a side has one latent; divided by its standard deviation, here each sample's own: a batch changes no sample.
Both change the noise itself, and so the target.
input_perturbation (Ning et al. 2023, arXiv 2301.11706): the model sees noise + gamma * z; the target keeps the noise alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from trainer.base import draws

Key = Sequence[int | str]


@dataclass(frozen=True)
class Noise:
    """Noise by the config's fields; 0 is off."""

    noise_offset: float = 0.0
    multires_noise_iterations: int = 0
    multires_noise_discount: float = 0.3
    input_perturbation: float = 0.0

    def draw(self, shape: Sequence[int], seed: int, key: Key) -> Tensor:
        """The noise of one sample, fp32 [C, H, W]."""
        noise = draws.normal(tuple(shape), seed, "noise", *key)
        if self.multires_noise_iterations:
            noise = self._multires(noise, seed, key)
        if self.noise_offset:
            noise = noise + self.noise_offset * draws.normal((shape[0], 1, 1), seed, "noise_offset", *key)
        return noise

    def _multires(self, noise: Tensor, seed: int, key: Key) -> Tensor:
        channels, height, width = noise.shape
        ratios = draws.uniforms(self.multires_noise_iterations, seed, "noise_ratios", *key)
        for level, ratio in enumerate(ratios):
            shrunk = (2 + 2 * ratio) ** level
            size = max(1, int(height / shrunk)), max(1, int(width / shrunk))
            coarse = draws.normal((1, channels, *size), seed, "noise_level", *key, level)
            wide = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)[0]
            noise = noise + self.multires_noise_discount**level * wide
            if 1 in size:
                break
        return noise / noise.std()

    def perturbation(self, shape: Sequence[int], seed: int, keys: Sequence[Key]) -> Tensor | None:
        """Added to the noise that the model sees, for samples with these keys: fp32 [B, C, H, W], or None for nothing."""
        if not self.input_perturbation:
            return None
        normal = [draws.normal(tuple(shape), seed, "input_perturbation", *key) for key in keys]
        return self.input_perturbation * torch.stack(normal)

    def describe(self) -> str:
        """The changes of the noise in words, after a comma; "" for none."""
        text = f", noise offset {self.noise_offset:g}" if self.noise_offset else ""
        if self.multires_noise_iterations:
            text += f", multi-resolution noise ({self.multires_noise_iterations} levels, {self.multires_noise_discount:g})"
        return text + (f", input perturbation {self.input_perturbation:g}" if self.input_perturbation else "")

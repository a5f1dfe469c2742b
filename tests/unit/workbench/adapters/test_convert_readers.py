"""Which programs take a DoRA: the arithmetic of each, on the files that a run writes, beside what docs/guide/use.md says.

Each formula is written anew, by what the program's code computes (LoRAs: W + alpha / rank B A in all of them):

    ComfyUI since April 2025 (weight_adapter/base.py), Forge since May 2025 (backend/patcher/lora.py)
        dora_scale [N, 1]: rows, divided by ||W||;  [1, K]: columns, divided by ||W + sBA||
    A1111 (extensions-builtin/Lora/network.py), InvokeAI (backend/patches/layers/dora_layer.py), ComfyUI and Forge before
        dora_scale: columns, divided by ||W + sBA||, whatever its shape
    diffusers and PEFT    lora_magnitude_vector: rows, divided by ||W + sBA||
    sd-scripts            knows no dora_scale
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT
from trainer.base.tensorfile import TensorFile, write_tensors
from workbench.adapter_files.opening import open_adapter
from workbench.adapters.convert import Conversion, convert

LAYER = "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2"  # [1280, 5120]: no square
ROWS, COLUMNS, RANK = 1280, 5120, 4
File = Mapping[str, torch.Tensor]  # by the ends of its keys
G = torch.Generator().manual_seed(5)
W = torch.randn(ROWS, COLUMNS, generator=G, dtype=torch.float64) * 0.02
A = torch.randn(RANK, COLUMNS, generator=G, dtype=torch.float64) * 0.02
B = torch.randn(ROWS, RANK, generator=G, dtype=torch.float64) * 0.05
V = W + B @ A
M = V.norm(dim=1) * (1 + 0.05 * torch.randn(ROWS, generator=G, dtype=torch.float64))
DEFINITION = (M / V.norm(dim=1))[:, None] * V


def adapted(file: File, down: str = "lora_down.weight", up: str = "lora_up.weight") -> torch.Tensor:
    scale = float(file["alpha"]) / RANK if "alpha" in file else 1.0
    return W + scale * file[up].double() @ file[down].double()


def by_rows_of_the_weight(file: File) -> torch.Tensor:
    m = file["dora_scale"].double()
    assert m.shape == (ROWS, 1)
    return adapted(file) * (m / W.norm(dim=1, keepdim=True))


def by_columns(file: File) -> torch.Tensor:
    v = adapted(file)
    return v * (file["dora_scale"].double() / v.norm(dim=0, keepdim=True))


def by_rows(file: File) -> torch.Tensor:
    v = adapted(file, "lora_A.weight", "lora_B.weight")
    return v * (file["lora_magnitude_vector"].double() / v.norm(dim=1))[:, None]


READERS: dict[str, Callable[[File], torch.Tensor]] = {
    "ComfyUI": by_rows_of_the_weight, "Forge": by_rows_of_the_weight, "A1111": by_columns, "InvokeAI": by_columns,
    "diffusers": by_rows, "PEFT": by_rows, "sd-scripts": adapted,
}  # fmt: skip


def takes() -> dict[str, tuple[str, str]]:
    """(kinds of adapters, file) of every program in the guide's table."""
    page = (ROOT / "docs" / "guide" / "use.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S.*?) \| ((?:LoRA|DoRA)[^|]*) \| `(\S+)` \|", page, re.MULTILINE)
    return {name: (kinds, file) for names, kinds, file in rows for name in names.split(", ") if name in READERS}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, File]:
    """A DoRA as a run writes it, by the names of the guide."""
    own = {f"{LAYER}.lora_A.weight": A, f"{LAYER}.lora_B.weight": B, f"{LAYER}.lora_magnitude_vector": M,
           f"{LAYER}.alpha": torch.tensor(float(RANK))}  # fmt: skip
    write_tensors(tmp_path / "own.safetensors", {key: tensor.clone() for key, tensor in own.items()})
    opened, made = open_adapter(tmp_path / "own.safetensors"), {}
    for name, to in (("NAME.safetensors", "diffusers"), ("NAME_comfyui.safetensors", "comfyui")):
        convert(opened, tmp_path / name, Conversion(to), lambda layer: W)
        tensors = TensorFile(tmp_path / name).read_all()
        stem = LAYER if to == "diffusers" else "lora_unet_middle_block_1_transformer_blocks_0_ff_net_2"
        assert all(key.startswith(f"{stem}.") for key in tensors)
        made[name] = {key.removeprefix(f"{stem}."): tensor for key, tensor in tensors.items()}
    return made


@pytest.mark.parametrize("reader", READERS)
def test_the_guide_sends_a_dora_to_readers_that_compute_it_and_to_no_others(reader: str, files) -> None:
    kinds, name = takes()[reader]
    error = float((READERS[reader](files[name]) - DEFINITION).norm() / (DEFINITION - W).norm())
    if "DoRA" in kinds:
        assert error < 1e-6
    else:
        assert error > 0.1, "what the guide warns of is no harm"


def test_the_noise_of_a_reader_of_columns_is_many_times_the_update(files) -> None:
    made = by_columns(files["NAME_comfyui.safetensors"])
    assert float((made - DEFINITION).norm() / (DEFINITION - W).norm()) > 1
    page = (ROOT / "docs" / "guide" / "use.md").read_text(encoding="utf-8")
    assert "A1111 and InvokeAI divide a `dora_scale` by the norms of the weight's columns" in " ".join(page.split())


def test_a_lora_made_of_a_dora_is_the_same_in_all(tmp_path: Path, files) -> None:
    """As far as its rank goes: the whole rank of the change is exact, and what a lower one loses is said."""
    own = {f"{LAYER}.lora_A.weight": A, f"{LAYER}.lora_B.weight": B, f"{LAYER}.lora_magnitude_vector": M,
           f"{LAYER}.alpha": torch.tensor(float(RANK))}  # fmt: skip
    write_tensors(tmp_path / "own.safetensors", {key: tensor.clone() for key, tensor in own.items()})
    done = convert(
        open_adapter(tmp_path / "own.safetensors"), tmp_path / "lora", Conversion("lora", rank=64), lambda layer: W
    )
    factors = done.portable.layers[LAYER]
    made = W + factors.scaling * factors.b.make().double() @ factors.a.make().double()
    lost = float((made - DEFINITION).norm() / (DEFINITION - W).norm())
    assert not done.portable.kind.magnitudes and any(f"{lost:.2%} of the change" in note for note in done.notes)

"""A folder that PEFT saved is read at the strength of PEFT's merged weights; what no LoRA file can mean is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from scripts import adapter as script
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from workbench.adapter_files.opening import open_adapter
from workbench.adapters.convert import Conversion, change_of, convert

ATTENTION = "mid_block.attentions.0.transformer_blocks.{}.attn1.to_q"
LAYERS = {
    ATTENTION.format(0): (1280, 1280),
    ATTENTION.format(1): (1280, 1280),
    "down_blocks.1.resnets.0.time_emb_proj": (640, 1280),
    "conv_in": (320, 4, 3, 3),
}
KOHYA = {
    ATTENTION.format(0): "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q",
    ATTENTION.format(1): "lora_unet_middle_block_1_transformer_blocks_1_attn1_to_q",
    "down_blocks.1.resnets.0.time_emb_proj": "lora_unet_input_blocks_4_0_emb_layers_1",
    "conv_in": "lora_unet_input_blocks_0_0",
}


def part_of_a_unet() -> nn.Module:
    """Some layers of SDXL's UNet, of their names and shapes, fp64."""
    torch.manual_seed(1)
    root = nn.Module()
    for name, shape in LAYERS.items():
        *way, last = name.split(".")
        inner = root
        for step in way:
            if not hasattr(inner, step):
                inner.add_module(step, nn.Module())
            inner = getattr(inner, step)
        layer = nn.Conv2d(shape[1], shape[0], shape[2]) if len(shape) > 2 else nn.Linear(shape[1], shape[0])
        inner.add_module(last, layer)
    return root.double()


def saved(folder: Path, **config: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(W, what PEFT's merged weight adds to it), fp64, of an adapter that PEFT made and saved."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "time_emb_proj", "conv_in"]} | config
    model = get_peft_model(part_of_a_unet(), LoraConfig(**chosen))
    base = {name: module.weight.detach().clone() for name, module in part_of_a_unet().named_modules() if name in LAYERS}
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_" in name:
                noise = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
                tensor.copy_(tensor * (1 + noise / 8) if "magnitude" in name else noise / 16)
    model.save_pretrained(folder)
    merged = model.merge_and_unload()
    made = {name: module.weight.detach() for name, module in merged.named_modules() if name in LAYERS}
    return base, {name: made[name] - w for name, w in base.items() if not torch.equal(made[name], w)}


SAID = {
    "alpha is twice the rank": {},
    "rank patterns": {"rank_pattern": {"attn1.to_q": 2, "conv_in": 3}, "alpha_pattern": {"conv_in": 5}},
    # PEFT takes the first that fits: the second entry fits all of the first's layers, and a name's middle fits none.
    "expressions": {
        "rank_pattern": {r".*_blocks\.0\.attn1\.to_(q|k)": 6, r".*to_q": 2, "attn1": 1},
        "alpha_pattern": {r"^conv_in$": 3, r"transformer_blocks.\d+.attn[12].to_q": 1.5, "emb": 100, "conv.?in": 7},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"to_q": 16}, "lora_alpha": 4},
    "dora": {"use_dora": True, "alpha_pattern": {"time_emb_proj": 1}},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
    "an expression names the layers": {"target_modules": r"conv_in|.*attn\d\.to_[qkv]"},
}


@pytest.mark.filterwarnings("ignore:.*pattern:UserWarning", "ignore:.*pattern:RuntimeWarning")
@pytest.mark.parametrize("case", SAID)
def test_a_folder_of_pefts_has_pefts_strength(tmp_path: Path, case: str) -> None:
    """Layer by layer in fp64, and what is written of it in kohya's keys, whose alpha is a number of fp32."""
    folder, out = tmp_path / "peft", tmp_path / "kohya.safetensors"
    base, changes = saved(folder, **SAID[case])
    opened = open_adapter(folder)
    assert {name.removeprefix("unet.") for name in opened.portable.layers} == changes.keys()
    for name, change in changes.items():
        factors, w = opened.portable.layers[f"unet.{name}"], base[name].flatten(1)
        ours = factors.scaling * factors.b.make().flatten(1) @ factors.a.make().flatten(1)
        if factors.magnitude is not None:
            ours = change_of(base[name], factors, opened.portable.meaning)
        assert (ours - change.flatten(1)).norm() <= 1e-12 * w.norm(), name
    convert(opened, out, Conversion("kohya"))
    written = TensorFile(out).read_all()
    for name, change in changes.items():
        down, up, alpha = (written[f"{KOHYA[name]}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        w, ours = base[name].flatten(1), float(alpha) / len(down) * up.flatten(1) @ down.flatten(1)
        if SAID[case].get("use_dora"):
            m, v = written[f"{KOHYA[name]}.dora_scale"].flatten(1), w + ours
            ours = m * v / v.norm(dim=1, keepdim=True) - w
        assert (ours - change.flatten(1)).norm() <= 2**-22 * w.norm(), name


def test_the_file_and_the_folder_are_one(tmp_path: Path, capsys) -> None:
    """On the command line, too. A file of other keys in that folder has nothing to do with its config."""
    folder = tmp_path / "peft"
    saved(folder, use_rslora=True)
    for number, given in enumerate((folder, folder / "adapter_model.safetensors")):
        assert script.main(["convert", str(given), str(tmp_path / f"{number}.safetensors"), "--to", "diffusers"]) == 0
    one, other = ((tmp_path / f"{number}.safetensors").read_bytes() for number in (0, 1))
    assert (
        one == other
        and json.loads(TensorFile(tmp_path / "0.safetensors").metadata["lora_adapter_metadata"])["unet.use_rslora"]
    )
    assert script.main(["compare", str(folder), str(tmp_path / "0.safetensors")]) == 0
    assert "every tensor and scale is equal" in (said := capsys.readouterr().out), said
    (folder / "own.safetensors").write_bytes(one)
    (folder / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    assert open_adapter(folder / "own.safetensors").portable.rslora
    (folder / "adapter_config.json").unlink()  # without it nothing says the scale, and that is said
    assert script.main(["convert", str(folder / "adapter_model.safetensors"), str(tmp_path / "2"), "--to", "kohya"]) == 0
    (line,) = open_adapter(folder / "adapter_model.safetensors").read.account.lines()
    assert line.startswith(
        f"assumed: 4 modules: no alpha in {folder / 'adapter_model.safetensors'}, so the scale is taken for 1 ("
    )
    assert "put its adapter_config.json beside it" in line and line in capsys.readouterr().out


def edited(folder: Path, **fields: Any) -> Path:
    """The folder with other entries in its config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    saved(folder)
    return folder


REFUSED = [
    ({"peft_type": "LOHA"}, r"is of another method \(peft_type = 'LOHA'\); LORA alone is read"),
    ({"peft_type": None}, r"\(peft_type = None\)"),
    *(
        ({"init_lora_weights": init}, f"init_lora_weights = '{init}', which changes the model's own weights .* plain LoRA")
        for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "newer")
    ),
    ({"bias": "lora_only"}, "bias = 'lora_only'"),
    ({"modules_to_save": ["conv_out"]}, r"sets .*modules_to_save = \['conv_out'\]"),
    ({"lora_bias": True}, "sets .lora_bias = True"),
    ({"fan_in_fan_out": True}, "sets .fan_in_fan_out = True"),
    ({"of_a_newer_peft": 1, "use_qalora": True}, "sets .of_a_newer_peft = 1., .use_qalora = True"),
    ({"r": 2}, "the rank 2, and the file has 4"),
    ({"rank_pattern": {"to_q": 8}}, "attn1.to_q' the rank 8, and the file has 4"),
    ({"target_modules": ["q"]}, "has no '.*' in its target_modules"),
    ({"target_modules": 3}, "target_modules = 3"),
    ({"use_dora": True}, "says use_dora, and .* has no magnitude"),
    ({"use_dora": "yes"}, "neither true nor false"),
    ({"lora_alpha": 0}, "the lora_alpha 0, which is no number"),
    ({"lora_alpha": "8"}, "no number"),
    ({"alpha_pattern": {"to_q": True}}, "'to_q' the lora_alpha True"),
    ({"alpha_pattern": ["to_q"]}, "alpha_pattern that is no table"),
    ({"alpha_pattern": {"to_(q": 1}}, "no regular expression"),
    ({"alpha_pattern": {"(a+)+$": 1}}, "groups that repeat"),
    ({"alpha_pattern": {"(?=.*a).*": 1}}, r"signs behind \(\?"),
    ({"alpha_pattern": {".*.*.*.*.*x": 1}}, "could take minutes"),
    ({"alpha_pattern": {"(.|.)" * 40: 1}}, "could take minutes"),
    ({"rank_pattern": {"a" * 400: 1}}, "an expression of 400 characters"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[str(fields)[:40] for fields, _ in REFUSED])
def test_what_the_file_cannot_mean_is_refused_with_the_reason(plain: Path, fields: dict[str, Any], words: str) -> None:
    config = plain / "adapter_config.json"
    before = config.read_bytes()
    try:
        with pytest.raises(UserError, match=f"adapter_config.json .*{words}"):
            open_adapter(edited(plain, **fields))
    finally:
        config.write_bytes(before)


@pytest.mark.skipif(os.name == "nt", reason="there are no pipes with names")
@pytest.mark.parametrize(("content", "words"), [(None, "is no file"), (b"[]", "is not a JSON object"), (b"{", "is damaged")])
def test_a_config_that_is_none_is_refused(tmp_path: Path, plain: Path, content: bytes | None, words: str) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes((plain / "adapter_model.safetensors").read_bytes())
    config = tmp_path / "adapter_config.json"
    os.mkfifo(config) if content is None else config.write_bytes(content)
    with pytest.raises(UserError, match=f"adapter_config.json {words}"):
        open_adapter(tmp_path)


def test_alphas_in_the_file_and_in_the_config_are_refused(tmp_path: Path, plain: Path) -> None:
    tensors = TensorFile(plain / "adapter_model.safetensors").read_all()
    write_tensors(tmp_path / "adapter_model.safetensors", tensors | {"base_model.model.conv_in.alpha": torch.tensor(1.0)})
    (tmp_path / "adapter_config.json").write_bytes((plain / "adapter_config.json").read_bytes())
    with pytest.raises(UserError, match="'base_model.model.conv_in.alpha': which of them counts is not known"):
        open_adapter(tmp_path)

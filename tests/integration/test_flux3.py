"""FLUX.3 klein on a tiny model: edits with references, its files by ComfyUI's table and diffusers' converter, refusals.

Runs in pairs of choices: test_families.py. What its room computes, bit by bit: unit/models/test_flux3.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_flux3_lora_to_diffusers
from PIL import Image

from scripts import make_model
from tests.harness import Workbench, built, metrics_of
from tests.integration.test_edits import NAMES, save, second_references
from tests.integration.test_graphs import trained
from tests.pipelines import flux3
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout
from trainer.base.tensorfile import TensorFile
from trainer.engine.step import draw_time_and_noise
from trainer.plan.run_plan import find_targets, open_source, resolve
from trainer.runtime import precision
from workbench.adapter_files.opening import open_adapter
from workbench.adapters.base_weights import whole_model_at
from workbench.commands import main as cli
from workbench.pages import model_card

REFERENCES = re.compile(r"\bimage_cond\b")


@pytest.fixture(scope="module", autouse=True)
def tiny(models: Path) -> None:
    """A tiny FLUX.3 beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "flux3", "--layout", "diffusers", str(models / "flux3")]
    assert (models / "flux3").exists() or make_model.main(wanted) == 0


@pytest.fixture
def photos(bench: Workbench) -> Path:
    """Four photos, each with a reference of 83 x 70 pixels."""
    folder = bench.tmp / "photos"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        save(folder / f"{name}.png", (64, 64), index)
        save(folder / f"{name}.ref.png", (83, 70), 10 + index)
        (folder / f"{name}.txt").write_text(f"make it {name}")
    return folder


def tree(bench: Workbench, photos: Path, **more: Any) -> dict[str, Any]:
    sources = [{"path": str(photos), "references": "files"}]
    return bench.tree("flux3", **({"data__sources": sources, "data__caption_dropout": 0.0} | more))


def train(config: dict[str, Any], *arguments: str, bench: Workbench) -> None:
    assert cli.main(["--config", str(bench.write(config)), *arguments]) == 0


def targets(config: dict[str, Any]) -> tuple[set[str], set[str]]:
    """(layers that are adapted, layers skipped for want of a gradient)."""
    parsed = configs.parse(config)
    source = open_source(parsed)
    adapted, _, skipped = find_targets(resolve(parsed, source), source.family, source)
    return {target.name for target in adapted}, set(skipped)


def test_layers_of_references_are_adapted_where_a_source_has_references(bench: Workbench, photos: Path) -> None:
    """Without them no gradient reaches these: they would stay in the file as they began."""
    shown, _ = targets(tree(bench, photos, adapter__targets="all"))
    alone, skipped = targets(bench.tree("flux3", adapter__targets="all"))
    beside = {name for name in shown if REFERENCES.search(name)}
    assert len(beside) == 1 + 2 + 6 and shown - beside == alone and {f"transformer.{name}" for name in beside} == skipped


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_edits_are_learned_from_what_the_stock_pipeline_is_shown(bench: Workbench, photos: Path, count: int) -> None:
    """The loss is that of its own inputs on the same draw; a killed run ends in the same bytes; each layer was trained; a
    sample is drawn by the card's code as in the run, to one of 256 levels, where sums round otherwise."""
    if count == 2:
        second_references(photos)
    names = ["a.ref.png", "a.ref2.png"][:count]
    sample = {"prompt": "make it a", "steps": 2, "guidance": 3.0, "references": [str(photos / name) for name in names]}
    fp32 = {name: {"dtype": "fp32"} for name in ("transformer", "text_encoder")}
    keys = {
        "adapter__targets": "all", "optimizer__lr": 1e-2, "model__components": fp32, "data__flip": True,
        "checkpoint__every_steps": 2, "validation__every_steps": 3, "validation__samples": [sample],
    }  # fmt: skip
    pipe = flux3(bench.models / "flux3")
    with built(configs.parse(tree(bench, photos, **keys | {"data__flip": False}))) as run, torch.no_grad():
        (occurrences,) = next(run.updates())
        batch, losses = run.reader[occurrences], run.step.losses
        ours = losses(batch, occurrences)
        time, noise = draw_time_and_noise(batch, objective=losses.objective, tokens=16, seed=losses.seed, update=occurrences)
        seen = []
        hook = pipe.transformer.register_forward_pre_hook(lambda module, a, given: seen.append(given), with_kwargs=True)
        for index, occurrence in enumerate(occurrences):
            name = occurrence.sample[2:].removesuffix(".png")
            images = [Image.open(photos / f"{name}.ref{number}.png").convert("RGB") for number in ("", "2")[:count]]
            pipe(prompt=f"make it {name}", image=images, width=64, height=64, num_inference_steps=1, output="images")
            latents, sigma = batch.latents[index : index + 1], time[index : index + 1].view(-1, 1, 1, 1)
            target = noise[index : index + 1] - latents
            noisy = ((1.0 - sigma) * latents + sigma * noise[index : index + 1]).flatten(2).transpose(1, 2)
            predicted = pipe.transformer(**seen[-2] | {"hidden_states": noisy, "timestep": time[index : index + 1]})[0]
            wanted = ((predicted.transpose(1, 2).unflatten(2, target.shape[-2:]) - target) ** 2).mean()[None]
            torch.testing.assert_close(ours[index : index + 1], wanted, rtol=1e-5, atol=0)
        hook.remove()

    train(tree(bench, photos, run__output_dir=str(bench.tmp / "whole"), **keys), bench=bench)
    parts = tree(bench, photos, run__output_dir=str(bench.tmp / "parts"), **keys)
    train(parts | {"run": parts["run"] | {"stop_after": 2}}, bench=bench)
    train(parts, "--resume_from", "auto", bench=bench)
    for name in ("adapters/bear.safetensors", "checkpoints/step-00000003/optimizer.safetensors",
                 "samples/step-00000003/00.png"):  # fmt: skip
        assert (bench.tmp / "whole" / name).read_bytes() == (bench.tmp / "parts" / name).read_bytes(), name
    assert metrics_of(bench.tmp / "whole") == metrics_of(bench.tmp / "parts")
    layout = Layout(bench.tmp / "whole")
    factors = TensorFile(layout.adapters / "bear.safetensors").read_all()
    assert all(value.any() for key, value in factors.items() if "lora_B" in key)
    assert any(REFERENCES.search(key) for key in factors)

    (code,) = re.findall(r"```python\n(.*?)```", layout.card.read_text(), re.DOTALL)
    assert "guider=ClassifierFreeGuidance(guidance_scale=3.0)" in code and f'"images/00-0{count}.png"' in code
    pipe.load_lora_weights(str(layout.adapters / "bear.safetensors"))
    theirs = np.asarray(draw_as(code, pipe, layout)).astype(int)
    ours = np.asarray(Image.open(layout.samples_of(3) / "00.png")).astype(int)
    before = np.asarray(Image.open(layout.samples_of(0) / "00.png")).astype(int)
    assert ours.shape == (64, 64, 3) and abs(ours - theirs).max() <= 1 and abs(ours - before).max() > 1


def draw_as(code: str, pipe: Any, layout: Layout) -> Image.Image:
    """What the card's code draws by a pipeline that has read the parts already."""
    from diffusers import ClassifierFreeGuidance
    from diffusers.utils import load_image

    assert model_card.PLACEHOLDER in code
    lines = [line for line in code.splitlines() if line.startswith(("pipe.update", "image = "))]
    local = {"pipe": pipe, "torch": torch, "ClassifierFreeGuidance": ClassifierFreeGuidance}
    local["load_image"] = lambda name: load_image(str(layout.adapters / name))
    exec("\n".join(lines), local)
    return local["image"]


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory) -> Path:
    """The output of a DoRA on all layers of the transformer that text and images pass, and on some of Qwen3-VL's."""
    bench = Workbench(models, tmp_path_factory.mktemp("everything"))
    rules = [{"component": "text_encoder", "match": "layers.3[01].*_proj", "rank": 3, "alpha": 1.5}]
    config = bench.tree("flux3", adapter__type="dora", adapter__targets="all", adapter__rules=rules, optimizer__lr=1e-2,
                        run__max_steps=2)  # fmt: skip
    train(config, bench=bench)
    return bench.tmp / "out"


def comfyui(config: dict) -> dict[str, str]:
    """The layers of ComfyUI's model, which has the original names, for each of diffusers'."""
    parts = {"attn.to_q": "q_proj", "attn.to_k": "k_proj", "attn.to_v": "v_proj", "attn.to_out.0": "attn_out",
             "ff.linear_in": "mlp_in", "ff.linear_out": "mlp_out"}  # fmt: skip
    stacks = {"mode_blocks.image": "content_mode_blocks.image", "mode_blocks.image_cond": "content_mode_blocks.image_cond",
              "txt_mode_blocks": "txt_mode_blocks", "single_transformer_blocks": "single_blocks"}  # fmt: skip
    table = {
        f"{ours}.{i}.{part}": f"{theirs}.{i}.{name}"
        for ours, theirs in stacks.items()
        for i in range(config["num_single_layers" if ours.startswith("single") else "num_layers"])
        for part, name in parts.items()
    }
    for kind in ("image", "image_cond", "txt"):
        for when in ("early", "single"):
            table[f"{when}_stream_modulations.{kind}.linear"] = f"{when}_stream_modulations.{kind}.lin"
    table |= {f"x_embedders.{kind}": f"emb_in.{kind}" for kind in ("image", "image_cond")}
    return table | {
        "context_embedder": "txt_in", "timestep_embedder.linear_1": "time_in.in_layer",
        "timestep_embedder.linear_2": "time_in.out_layer", "proj_out": "final_layer.image.linear",
        "norm_out.linear": "final_layer.image.adaLN_modulation.1",
    }  # fmt: skip


@pytest.mark.slow
def test_comfyui_has_a_layer_for_every_key(everything: Path, models: Path) -> None:
    """By its table each layer says what the file for diffusers says; the last modulation's rows lie the other way round. Its
    releases divide by ||W||, diffusers by ||W + s B A||."""
    model = whole_model_at(str(models / "flux3"))
    file, diffusers = (TensorFile(everything / "adapters" / f"bear{end}.safetensors").read_all() for end in ("_comfyui", ""))
    table = comfyui(model.config("transformer"))
    assert set(table) == set(model.layers("transformer"))
    base = TensorFile(models / "flux3" / "transformer" / "diffusion_pytorch_model.safetensors")
    stems = {key.partition(".lora_")[0] for key in file if ".lora_" in key}
    passed = {name for name in table if not REFERENCES.search(name)}
    encoders = {name for name in stems if name.startswith("text_encoders.")}
    assert stems - encoders == {f"lora_unet_{table[name].replace('.', '_')}" for name in passed}
    assert encoders and encoders <= {
        f"text_encoders.qwen3vl_4b.transformer.model.{name}" for name in model.layers("text_encoder")
    }
    for name in passed:
        stem = f"lora_unet_{table[name].replace('.', '_')}"
        up, down, alpha, scale = (
            file[f"{stem}.{end}"].double() for end in ("lora_up.weight", "lora_down.weight", "alpha", "dora_scale")
        )
        a, b = (diffusers[f"transformer.{name}.lora_{part}.weight"].double() for part in "AB")
        weight = base.read(f"{name}.weight").double()
        norms = diffusers[f"transformer.{name}.lora_magnitude_vector"].double().flatten() * weight.norm(dim=1)
        norms, delta = norms / (weight + 0.5 * b @ a).norm(dim=1), b @ a * 0.5  # alpha 2 of rank 4
        if name == "norm_out.linear":
            delta, norms = (torch.cat(each.chunk(2)[::-1]) for each in (delta, norms))
        assert torch.allclose(up @ down * alpha / len(down), delta, rtol=1e-6, atol=1e-12), name
        assert torch.allclose(scale.flatten(), norms, rtol=1e-6, atol=0), name


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ComfyUI", "PEFT of the original model", "diffusers without prefix"])
def test_files_of_others_are_read(everything: Path, models: Path, tmp_path: Path, form: str) -> None:
    """Under their names, all layers. diffusers' own converter renames those in blocks alone: under ComfyUI's names the others
    would find no layer there."""
    from safetensors.torch import load_file, save_file

    model = whole_model_at(str(models / "flux3"))
    table, made = comfyui(model.config("transformer")), {}
    prefix = {"ComfyUI": "diffusion_model.", "PEFT of the original model": "base_model.model.diffusion_model."}.get(form, "")
    factors = load_file(everything / "adapters" / "bear.safetensors")
    for key in (key for key in factors if key.endswith("lora_A.weight")):
        name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        theirs = prefix + (table[name] if prefix else name)
        b = factors[key.replace("lora_A", "lora_B")]
        if prefix and name == "norm_out.linear":
            b = torch.cat(b.chunk(2)[::-1])
        made |= {f"{theirs}.lora_A.weight": factors[key], f"{theirs}.lora_B.weight": b.contiguous()}
    save_file(made, tmp_path / "theirs.safetensors")
    opened = open_adapter(tmp_path / "theirs.safetensors", [model])
    assert opened.model.family.name == "flux3" and len(opened.portable.layers) == len(made) // 2
    for name, layer in opened.portable.layers.items():
        assert torch.equal(layer.a.make(), factors[f"{name}.lora_A.weight"]), name
        assert torch.equal(layer.b.make(), factors[f"{name}.lora_B.weight"]), name
    if form == "ComfyUI":
        converted = {key.partition(".lora_")[0] for key in _convert_non_diffusers_flux3_lora_to_diffusers(made)}
        lost = {name for name in table if not REFERENCES.search(name)} - {
            name.removeprefix("transformer.") for name in converted
        }
        assert lost == {name for name in table if "blocks." not in name and not REFERENCES.search(name)}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__allow_distilled": True}, r"model\.allow_distilled = True has no effect on flux3"),
        ({"objective__guidance": 2.0}, r"objective\.guidance = 2\.0 has no effect on flux3"),
        ({"adapter__targets": ["mode_blocks.image_cond.*"]}, r"'mode_blocks\.image_cond\.\*' matches no layer"),
    ],
)
def test_what_is_refused(bench: Workbench, changed: dict, said: str) -> None:
    with pytest.raises(UserError, match=said), built(bench.config("flux3", **changed)):
        pass


@pytest.mark.slow
def test_replayed_micro_batches_leave_the_bytes_of_eager_ones(bench: Workbench, monkeypatch) -> None:
    """As a graph's replay does."""
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 2)
    eager, before = trained(bench, "flux3", taped=False, adapter__type="dora")
    replayed, after = trained(bench, "flux3", taped=True, adapter__type="dora")
    assert replayed == eager and all(torch.equal(after[name], before[name]) for name in before)

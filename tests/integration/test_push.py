"""A run's adapter files reach a repository byte for byte, in one commit; or nothing does, with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from tests import hub_uploads
from tests.harness import Workbench
from trainer.base.tensorfile import write_tensors
from workbench.commands import main as cli

pytestmark = pytest.mark.tool("adapters")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a run leaves it, with what it does not send."""
    folder, g = tmp_path / "adapters", torch.Generator().manual_seed(0)
    (folder / "images").mkdir(parents=True)
    for name in ("bear.safetensors", "bear_ema.safetensors"):
        layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
        tensors = {f"{layer}.lora_A.weight": torch.randn(4, 1280, generator=g)}
        tensors |= {f"{layer}.lora_B.weight": torch.randn(1280, 4, generator=g)}
        write_tensors(folder / name, tensors, {"format": "pt"})
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n\n# bear\n")
    (folder / "images" / "00.png").write_bytes(b"\x89PNG of a bear")
    for unsent in (".bear.safetensors.12.ab.tmp", "notes.txt", "images/.00.png.12.ab.tmp", "old.ckpt"):
        (folder / unsent).write_text("not for others")
    return folder


SENT = ["README.md", "bear.safetensors", "bear_ema.safetensors", "images/00.png"]


def test_a_folder_is_pushed_byte_for_byte(folder: Path, monkeypatch, capsys) -> None:
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == 0
        assert hub.visibility == {"me/bear": "private"}
        assert hub.repositories["me/bear"] == {name: (folder / name).read_bytes() for name in SENT}
        assert hub.commits == [("Upload adapter files", SENT)]
        said = capsys.readouterr().out
        assert f"{hub.url}/me/bear, private, commit" in said and all(f"\n  {name}" in said for name in SENT)
        # Again, with the card that is there: the repository stays as visible as it is, which is said.
        (folder / "images" / "00.png").write_bytes(b"another picture")
        assert script.main(["push", str(folder), "--repo", "me/bear", "--public"]) == 0
        assert "me/bear, private, commit" in (said := capsys.readouterr().out) and "stays private: --public is for" in said
        assert hub.repositories["me/bear"]["images/00.png"] == b"another picture"
        assert hub.visibility == {"me/bear": "private"} and len(hub.commits) == 2
        assert script.main(["push", str(folder), "--repo", "me/open", "--public"]) == 0
        assert hub.visibility["me/open"] == "public" and "me/open, public, commit" in capsys.readouterr().out


def test_a_card_of_the_hub_is_replaced_only_when_asked(folder: Path, monkeypatch, capsys) -> None:
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        command = ["push", str(folder), "--repo", "me/bear"]
        assert script.main(command) == 0
        hub.repositories["me/bear"]["README.md"] = b"edited on the hub"
        assert script.main(command) == 2
        assert "has another README.md" in capsys.readouterr().err and len(hub.commits) == 1
        assert hub.repositories["me/bear"]["README.md"] == b"edited on the hub"
        assert script.main([*command, "--replace_card"]) == 0
        assert hub.repositories["me/bear"]["README.md"] == (folder / "README.md").read_bytes()
        hub.repositories["me/bear"]["README.md"] = b"edited on the hub"
        (folder / "README.md").unlink()
        assert script.main(command) == 0 and hub.repositories["me/bear"]["README.md"] == b"edited on the hub"


REFUSED = {
    "no token": ("me/bear", {"token": "hf_other"}, "log in with `hf auth login`"),
    "somebody else's": ("you/bear", {}, "the token may not write there (403)"),
    "no name": ("a/b/c", {}, "'a/b/c' is no name of a repository"),
    "a bad card": ("me/bear", {"refused": '"license" must be one of'}, "Invalid metadata in README.md"),
    "lost bytes": ("me/bear", {"lose": True}, "could not be pushed to"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_hub_refuses_is_one_message(folder: Path, monkeypatch, capsys, what: str) -> None:
    repository, faults, said = REFUSED[what]
    with hub_uploads.serve(**faults) as hub:
        hub.use(monkeypatch, "hf_write")
        assert script.main(["push", str(folder), "--repo", repository]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and "Traceback" not in told
        assert not hub.commits and not any(hub.repositories.values())
        assert ("was made, and is empty" in told) == bool(hub.repositories)


def test_nobody_there_is_one_message(folder: Path, monkeypatch, capsys) -> None:
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
    assert script.main(["push", str(folder), "--repo", "me/bear"]) == 2
    assert "'me/bear' could not be pushed to: " in capsys.readouterr().err


Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
FLAT = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
NAMINGS = {
    "diffusers": (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
    "kohya": (f"{FLAT}.lora_down.weight", f"{FLAT}.lora_up.weight"),
    "comfyui": tuple(
        f"diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_{x}.weight" for x in ("down", "up")
    ),
    "older diffusers": (f"{Q}.lora.down.weight", f"{Q}.lora.up.weight"),
}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    ("a", "b", "status", "said"),
    [
        (1.0, float("nan"), 4, "bear.safetensors: B of unet."),
        (float("inf"), 1.0, 4, "bear.safetensors: A of unet."),
        (1.0, 0.0, 2, "every B (or A) is zero"),
        (0.0, 1.0, 2, "every B (or A) is zero"),
    ],
)
def test_an_adapter_that_nobody_could_use_is_not_sent(folder: Path, monkeypatch, capsys, naming, a, b, status, said) -> None:
    down, up = NAMINGS[naming]
    write_tensors(folder / "bear.safetensors", {down: torch.full((1, 1280), a), up: torch.full((1280, 1), b)})
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == status
        assert said in capsys.readouterr().err and not hub.repositories


def test_a_folder_without_adapter_files_is_not_sent(folder: Path, monkeypatch, capsys) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == 2
        assert "has no .safetensors file" in capsys.readouterr().err and not hub.repositories


@pytest.mark.parametrize("name", ["optimizer", "model", "hadamard"])
def test_what_is_no_adapter_is_not_sent(folder: Path, monkeypatch, capsys, name: str) -> None:
    """Of a checkpoint, of a model's folder, and of a method that is neither LoRA nor DoRA: beside a whole adapter."""
    tensors = {
        "optimizer": {f"{Q}.lora_A.weight.exp_avg": torch.ones(4, 1280)},
        "model": {f"{Q}.weight": torch.ones(4, 4)},
        "hadamard": {f"{FLAT}.hada_w1_a": torch.zeros(4, 4), f"{FLAT}.hada_w1_b": torch.zeros(4, 4)},
    }[name]
    write_tensors(folder / f"{name}.safetensors", tensors)
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == 2
        said = capsys.readouterr().err
        assert f"{name}.safetensors" in said and "nothing was sent" in said and not hub.repositories


@pytest.mark.slow
def test_only_adapters_of_a_run_are_sent(bench: Workbench, monkeypatch, capsys) -> None:
    """Its checkpoint and its model are refused; its adapter files are of another size than the published models."""
    tree = bench.tree(run__max_steps=1, adapter__targets=["*attn1.to_q"], optimizer__lr=1e-2, schedule__warmup=0)
    assert cli.main(["--config", str(bench.write(tree))]) == 0
    model = ["--base", str(bench.models / "sdxl")]
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        for private in (bench.tmp / "out/checkpoints/step-00000001", bench.models / "sdxl" / "unet"):
            assert any(private.glob("*.safetensors"))
            for more in (model, []):
                assert script.main(["push", str(private), "--repo", "me/bear", *more]) == 2
                assert "nothing was sent" in capsys.readouterr().err
        adapters = bench.tmp / "out/adapters"
        elsewhere = shutil.copytree(adapters, bench.tmp / "elsewhere")
        assert script.main(["push", str(elsewhere), "--repo", "me/bear"]) == 2
        assert "give it with --base" in capsys.readouterr().err and not hub.repositories
        assert script.main(["push", str(elsewhere), "--repo", "me/bear", *model]) == 0
        assert set(hub.repositories["me/bear"]) == {"README.md", "bear.safetensors", "bear_comfyui.safetensors"}
        assert script.main(["push", str(adapters), "--repo", "me/another"]) == 0
        assert f"model: {bench.models / 'sdxl'}, as config.toml of its run says" in capsys.readouterr().out

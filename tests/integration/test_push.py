"""A run's adapter files reach a repository byte for byte, in one commit; or nothing does, with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from tests import hub_uploads
from trainer.tensorfile import write_tensors


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
        assert f"{hub.url}/me/bear" in said and all(f"\n  {name}" in said for name in SENT)
        # Again, with a change: the repository stays as visible as it is.
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        assert script.main(["push", str(folder), "--repo", "me/bear", "--public"]) == 0
        assert hub.repositories["me/bear"]["README.md"].startswith(b"---\nlicense: mit")
        assert hub.visibility == {"me/bear": "private"} and len(hub.commits) == 2
        assert script.main(["push", str(folder), "--repo", "me/open", "--public"]) == 0
        assert hub.visibility["me/open"] == "public"


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


def test_nobody_there_is_one_message(folder: Path, monkeypatch, capsys) -> None:
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
    assert script.main(["push", str(folder), "--repo", "me/bear"]) == 2
    assert "'me/bear' could not be pushed to: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [(float("nan"), 4, "bear.safetensors: unet.l.lora_B.weight is not finite"), (0.0, 2, "every B is zero")],
)
def test_an_adapter_that_nobody_could_use_is_not_sent(folder: Path, monkeypatch, capsys, value, status, said) -> None:
    tensors = {"unet.l.lora_A.weight": torch.ones(1, 4), "unet.l.lora_B.weight": torch.full((4, 1), value)}
    write_tensors(folder / "bear.safetensors", tensors)
    with hub_uploads.serve() as hub:
        hub.use(monkeypatch, hub.token)
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == status
        assert said in capsys.readouterr().err and not hub.repositories
        shutil.rmtree(folder / "images")
        for path in folder.glob("*.safetensors"):
            path.unlink()
        assert script.main(["push", str(folder), "--repo", "me/bear"]) == 2
        assert "has no .safetensors file" in capsys.readouterr().err and not hub.repositories

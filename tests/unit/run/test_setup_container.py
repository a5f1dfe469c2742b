"""Whether what a run writes outlives its container: told from the mounts, in this project's image alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.run import setup

VOLUMES = "/var/lib/docker/volumes"
HEX = "0123456789abcdef" * 4
ROOT = "1 0 0:30 / / rw,relatime master:5 - overlay overlay rw,lowerdir=/l"
PODS = "/var/lib/kubelet/pods/1/volumes"


def mount(source: str, point: str, kind: str = "ext4") -> str:
    return f"9 1 8:1 {source} {point} rw,relatime shared:1 - {kind} /dev/sda1 rw"


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *mounts: str, output: str = "/outputs/bear") -> str:
    file = tmp_path / "mountinfo"
    file.write_text("\n".join((ROOT, *mounts)) + "\n", encoding="utf-8")
    monkeypatch.setattr(setup, "MOUNTS", file)
    monkeypatch.setenv(setup.IN_IMAGE, "1")
    return " ".join(setup.container_warnings(Path(output), "run.output_dir"))


@pytest.mark.parametrize(
    "mounts",
    [
        pytest.param([], id="nothing is mounted"),
        pytest.param([mount("/home/a/data", "/data")], id="another folder is"),
        pytest.param([mount("/home/a/outputs2", "/outputs2")], id="one whose name begins so"),
        pytest.param([mount("/", "/outputs", "tmpfs")], id="memory is"),
    ],
)
def test_an_output_that_is_in_the_container_is_told(tmp_path, monkeypatch, mounts: list[str]) -> None:
    said = told(tmp_path, monkeypatch, *mounts)
    assert said.startswith("run.output_dir is in the container and goes with it") and '-v "$PWD/outputs:/outputs"' in said


@pytest.mark.parametrize(
    "source",
    [f"{VOLUMES}/{HEX}/_data", f"/volumes/{HEX}/_data", f"/run/containers/{HEX}/volumes/{HEX}",
     f"{PODS}/kubernetes.io~empty-dir/outputs"],
)  # fmt: skip
def test_a_volume_that_nobody_named_is_told(tmp_path, monkeypatch, source: str) -> None:
    said = told(tmp_path, monkeypatch, mount(source, "/outputs"))
    assert "a volume without a name" in said and '-v "$PWD/outputs:/outputs"' in said


@pytest.mark.parametrize(
    ("source", "point", "output"),
    [("/home/a/outputs", "/outputs", "/outputs/bear"), (f"{VOLUMES}/lora/_data", "/outputs", "/outputs"),
     ("/export", "/workspace", "/workspace/outputs/bear"), ("/home/a", "/my\\040outputs", "/my outputs/bear"),
     (f"{PODS}/kubernetes.io~csi/lora", "/outputs", "/outputs/bear")],
)  # fmt: skip
def test_a_folder_that_outlives_the_container_is_not(tmp_path, monkeypatch, source: str, point: str, output: str) -> None:
    assert told(tmp_path, monkeypatch, mount(source, point), output=output) == ""


def test_the_innermost_and_last_mount_counts(tmp_path, monkeypatch) -> None:
    folder, memory = mount("/home/a", "/outputs"), mount("/", "/outputs/fast", "tmpfs")
    assert told(tmp_path, monkeypatch, memory, folder) == ""
    assert told(tmp_path, monkeypatch, memory, folder, output="/outputs/fast/bear")
    assert told(tmp_path, monkeypatch, folder, mount("/", "/outputs", "tmpfs"))


def test_a_link_is_followed(tmp_path, monkeypatch) -> None:
    """The image's /app/outputs is a link to /outputs."""
    (tmp_path / "outputs").symlink_to("/outputs")
    mounted = mount("/home/a/outputs", "/outputs")
    assert told(tmp_path, monkeypatch, mounted, output=str(tmp_path / "outputs" / "bear")) == ""


def test_elsewhere_nothing_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(setup.IN_IMAGE, raising=False)
    monkeypatch.setattr(setup, "MOUNTS", tmp_path / "not read")
    assert setup.container_warnings(tmp_path, "run.output_dir") == []

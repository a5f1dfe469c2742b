"""The recipes of docker/ agree: one image, the same volumes and keys, one command, nothing else written to."""

from __future__ import annotations

import dataclasses

import pytest

from tests.proofs import recipes
from tests.proofs.recipes import Start

HARDENED: dict[str, Start] = {"docker run": recipes.docker_run(), "compose": recipes.compose()} | {
    name: recipes.pods(name)[0] for name in recipes.PODS
}
VOLUMES = {"/data": "data", "/cache": "cache", "/outputs": "outputs"}


@pytest.mark.parametrize("name", HARDENED)
def test_only_the_volumes_and_tmp_are_written_to(name: str) -> None:
    start = HARDENED[name]
    assert start.read_only and start.hardened
    assert dict(start.mounts) | {"/dev/shm": "tmpfs"} == VOLUMES | {"/tmp": "tmpfs", "/dev/shm": "tmpfs"}
    assert start.user in (None, (1000, 1000)) and start.group in (None, 1000)


@pytest.mark.parametrize("name", HARDENED)
def test_each_is_handed_the_keys(name: str) -> None:
    assert HARDENED[name].keys


def test_each_takes_one_image() -> None:
    published = {start.image for name, start in HARDENED.items() if name in recipes.PODS}
    assert published == {"ghcr.io/OWNER/lora-trainer:cu130"}
    assert recipes.runpod({}).image == f"{published.pop()}-runpod"
    assert {HARDENED[name].image for name in ("docker run", "compose")} == {"lora-trainer"}


def test_each_starts_the_same_command() -> None:
    words = ("--config", "data/bear.toml", "--resume_from", "auto")
    for name, start in (*HARDENED.items(), ("runpod", recipes.runpod({}))):
        if start.entrypoint is None:
            assert start.words[:4] == words and (len(start.words) == 4 or name == "kubernetes_array.yaml")
        else:
            assert " ".join(("exec python train.py", *words)) in start.entrypoint[-1]


def test_runpods_keys_are_secrets_and_its_caches_lie_on_the_volume() -> None:
    nothing = dict(recipes.runpod({}).environment)
    keys = {name for name, value in nothing.items() if value == f"{{{{ RUNPOD_SECRET_{name} }}}}"}
    page = recipes.text_of("README.md").partition("`.env` holds")[2].partition("\n\n")[0]
    assert keys == {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "WANDB_API_KEY"}
    assert all(f"`{key}=...`" in page for key in keys)
    assert all(value.startswith("/workspace/cache/") for name, value in nothing.items() if name not in keys)
    assert recipes.runpod({"HF_TOKEN": "hf_1"}).environment["HF_TOKEN"] == "hf_1"


def test_the_runs_of_an_indexed_job_share_nothing_that_they_write() -> None:
    starts = recipes.pods("kubernetes_array.yaml")
    outputs = [word for start in starts for word in start.words if word.startswith("run.output_dir=")]
    assert outputs == [f"run.output_dir=outputs/bear-seed-{number}" for number in range(4)]
    same = {dataclasses.replace(start, words=(), environment=None, mounts=None, host="") for start in starts}
    assert len(same) == 1 and len({start.host for start in starts}) == 4
    assert recipes.documents("kubernetes_array.yaml")["Job"]["spec"]["parallelism"] == 4


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "skypilot.yaml", "runpod.json"])
def test_a_mirror_is_offered_with_the_words_of_train_py(name: str) -> None:
    assert recipes.mirror_words(name)[:2] == ("--set", "checkpoint.mirror=s3://BUCKET/PREFIX")


def test_what_a_mirror_needs_outside_the_image_is_said_where_it_is_offered() -> None:
    for name in ("slurm.sh", "skypilot.yaml", "README.md"):
        assert "bash scripts/setup.sh s3" in recipes.text_of(name), name

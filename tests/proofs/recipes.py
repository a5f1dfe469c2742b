"""What each file of docker/ starts: read from the file itself, as Docker, Kubernetes, RunPod, SkyPilot and Slurm read it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"
CLOUDS = DOCKER / "clouds"
PODS = ("kubernetes.yaml", "kubernetes_array.yaml", "kubernetes_elastic.yaml")
TMPFS = "tmpfs"  # in `Start.mounts`, in place of a folder: one that is empty at the start and goes with the container


@dataclass(frozen=True)
class Start:
    """One container of a recipe.

    image: its name. entrypoint: None for the image's own. words: what follows it. mounts: what is mounted, by its place in
    the container. environment: what the file sets itself. keys: whether the keys of .env are handed over. user: (uid, gid),
    None for the image's. group: owns the volumes beside root (fsGroup), None where a recipe leaves their owners as they are.
    hardened: without capabilities, and without a way to new ones.
    """

    image: str
    words: tuple[str, ...]
    mounts: Mapping[str, str]
    entrypoint: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    keys: bool = False
    user: tuple[int, int] | None = None
    group: int | None = None
    read_only: bool = False
    hardened: bool = False
    host: str = "trainer"


def text_of(name: str) -> str:
    """The text of a file of docker/ or docker/clouds/."""
    return next(place / name for place in (DOCKER, CLOUDS) if (place / name).exists()).read_text(encoding="utf-8")


def documents(name: str) -> dict[str, Any]:
    """The objects of a Kubernetes file by their kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(text_of(name))}


def docker_run() -> Start:
    """The command of README.md for Docker alone."""
    (command,) = re.findall(r"^    (docker run .*?[^\\])$", text_of("README.md"), re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))[2:]
    given: dict[str, list[str]] = {}
    while words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        takes = {"--gpus", "--tmpfs", "--env-file", "--stop-timeout", "--cap-drop", "-v"}
        given.setdefault(name, []).append(value or (words.pop(0) if name in takes else ""))
    volumes = dict(reversed(volume.split(":")) for volume in given["-v"])
    return Start(
        words.pop(0), tuple(words), {place: folder.removeprefix("$PWD/") for place, folder in volumes.items()}
        | dict.fromkeys(given["--tmpfs"], TMPFS), keys=given["--env-file"] == [".env"], read_only="--read-only" in given,
        hardened=given["--cap-drop"] == ["ALL"],
    )  # fmt: skip


def compose() -> Start:
    """compose.yaml, where no variable is set."""
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text_of("compose.yaml"))
    service = yaml.safe_load(text)["services"]["trainer"]
    volumes = dict(reversed(volume.split(":")) for volume in service["volumes"])
    return Start(
        service["image"], tuple(service["command"]), {place: folder.removeprefix("../") for place, folder in volumes.items()}
        | dict.fromkeys(service["tmpfs"], TMPFS), keys=service["env_file"] == [{"path": "../.env", "required": False}],
        read_only=service["read_only"],
        hardened=service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"],
    )  # fmt: skip


def pods(name: str) -> list[Start]:
    """The pods of a Kubernetes file, one for each number of an indexed job."""
    job = documents(name)["Job"]
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    folders = {each["name"]: TMPFS if "emptyDir" in each else "" for each in pod["volumes"]}
    mounts = {each["mountPath"]: each.get("subPath") or folders[each["name"]] for each in trainer["volumeMounts"]}
    of_pod, own = pod["securityContext"], trainer["securityContext"]
    start = Start(
        trainer["image"], tuple(trainer.get("args", ())), mounts,
        entrypoint=tuple(trainer["command"]) if "command" in trainer else None,
        keys=trainer["envFrom"] == [{"secretRef": {"name": "lora", "optional": True}}],
        user=(of_pod["runAsUser"], of_pod["runAsGroup"]) if of_pod["runAsNonRoot"] else None, group=of_pod["fsGroup"],
        read_only=own["readOnlyRootFilesystem"],
        hardened=own["capabilities"] == {"drop": ["ALL"]} and own["allowPrivilegeEscalation"] is False,
        host=job["metadata"]["name"],
    )  # fmt: skip
    if job["spec"].get("completionMode") != "Indexed":
        return [start]
    return [_numbered(start, number) for number in range(job["spec"]["completions"])]


def _numbered(start: Start, number: int) -> Start:
    """A pod of an indexed job: the API's variable of its number stands in its words, and the number in its name."""
    words = tuple(word.replace("$(JOB_COMPLETION_INDEX)", str(number)) for word in start.words)
    return replace(
        start, words=words, host=f"{start.host}-{number}", environment={"JOB_COMPLETION_INDEX": str(number)}
    )  # fmt: skip


def runpod(secrets: Mapping[str, str]) -> Start:
    """runpod.json in an account with these secrets. One that is not there comes as it was written."""
    template = json.loads(text_of("runpod.json"))
    asked = re.compile(r"\{\{ RUNPOD_SECRET_(\w+) \}\}")
    return Start(
        template["imageName"], tuple(template["dockerStartCmd"]), {template["volumeMountPath"]: "volume"},
        environment={name: asked.sub(lambda s: secrets.get(s[1], s[0]), text) for name, text in template["env"].items()},
        entrypoint=tuple(template["dockerEntrypoint"]) if template.get("dockerEntrypoint") else None, user=(0, 0),
    )  # fmt: skip


def mirror_words(name: str) -> tuple[str, ...]:
    """What a file's comment offers to add for a bucket, as further words of train.py."""
    (comment,) = re.findall(r"(--set\S* [^\n]*checkpoint\.mirror=\S+)", text_of(name))
    return tuple(re.sub(r'[",]', " ", comment).split())

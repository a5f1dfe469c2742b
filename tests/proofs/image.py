"""The image is built and run, and so is every recipe of docker/, as far as a machine without its cloud can.

    python tests/proofs/image.py FOLDER               # Debian, as root, with buildah and debootstrap; 25 GB of disk
    python tests/proofs/image.py FOLDER --only compose

docker/Dockerfile is built as it stands, both of its targets. No registry of images is asked: where the image that it begins
with is not here, Debian's own packages stand for it under that name (their Python is another patch release). Then the
command of each recipe, read from its file (tests/proofs/recipes.py), is started in the built image: as process 1 of a root of
its own, with the recipe's user, environment, volumes, capabilities and read-only root. Each ends with status 0 and leaves an
adapter and a report on its volume; one is stopped by SIGTERM and goes on; with the words that the file offers for a mirror,
each copies to an S3 on the loopback. FOLDER keeps logs and outputs; the image stays in buildah's store.

What it does not show: the true base image, Docker's engine, a GPU, a cloud. Exit status 1 where anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import object_store  # noqa: E402
from tests.proofs import recipes  # noqa: E402
from tests.proofs.recipes import TMPFS, Start  # noqa: E402

DOCKERFILE = recipes.DOCKER / "Dockerfile"
TARGETS = {"trainer": "lora-trainer", "runpod": "lora-trainer-runpod"}  # what each is called in buildah's store
CERTIFICATES = "/etc/ssl/certs"  # of this machine, seen by the build: the network may have one of its own
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
# Mounts what a container engine does, then becomes the command. $1: the root. $2: ro or rw. $3: its name. The lines on
# standard input are mounts, "PLACE FOLDER".
ENTER = r"""
set -eu
root=$1 mode=$2
hostname "$3"
shift 3
mount --bind "$root" "$root"
while read -r place folder; do
    mkdir -p "$root$place"
    if [ "$folder" = tmpfs ]; then
        [ "$place" = /dev/shm ] || mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root$place"
    else
        mount --bind "$folder" "$root$place"
    fi
done
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$root/dev/"
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/dev/shm"
touch "$root/etc/resolv.conf"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
mount --bind "$hosts" "$root/etc/hosts"
mount -o "remount,bind,$mode" "$root"
exec chroot "$root" "$@" < /dev/null
"""


def asked(*command: str | Path, **options: Any) -> str:
    """Its standard output. Exits with its messages where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-3000:]}")
    return done.stdout.strip()


# --- building ---------------------------------------------------------------------------------------------------------


def make_base(folder: Path) -> str:
    """What the image begins with: its name, where it is in buildah's store, else Debian's packages under that name."""
    (name,) = re.findall(r"^FROM (python:\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    whole = f"docker.io/library/{name}"
    if subprocess.run(["buildah", "inspect", "--type", "image", whole], capture_output=True).returncode == 0:
        return f"{name}: in the store"
    root = folder / "base"
    asked("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", root)
    asked("chroot", root, "python3", "-m", "venv", "/usr/local")  # its Python lies in /usr/local/bin, as in the true one
    container = asked("buildah", "from", "scratch")
    asked("buildah", "add", "--quiet", container, root, "/")
    asked("buildah", "config", "--env", f"PATH={PATH}", container)
    asked("buildah", "commit", "--quiet", "--rm", container, whole)
    shutil.rmtree(root)
    return f"{name}: Debian's packages stand for it"


def build(target: str, torch: str) -> None:
    """A target of the Dockerfile, as TARGETS calls it."""
    asked(
        "buildah", "bud", "--pull-never", "--isolation", "chroot", "--format", "docker", "--layers", "--target", target,
        "--build-arg", f"TORCH={torch}", "-v", f"{CERTIFICATES}:{CERTIFICATES}:ro", "-f", DOCKERFILE, "-t", TARGETS[target],
        ROOT,
    )  # fmt: skip


def settings(name: str) -> dict[str, Any]:
    """An image's Env (a dictionary here), User, Entrypoint, WorkingDir and the like."""
    found = json.loads(asked("buildah", "inspect", "--type", "image", name))["Docker"]["config"]
    return found | {"Env": dict(pair.split("=", 1) for pair in found["Env"])}


# --- running ----------------------------------------------------------------------------------------------------------


class Machine:
    """What stands for a cloud's machine: volumes below `folder`, and keys as .env holds them."""

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.keys, self.count = folder, keys, 0
        self.network: list[str] = []  # what starts a command in another network than this machine's
        (folder / "data").mkdir(parents=True)
        shutil.copytree(ROOT / "examples" / "icons" / "lessons", folder / "data" / "bear")
        (folder / "data" / "bear.toml").write_text(config("bear"), encoding="utf-8")
        (folder / "hosts").write_text("127.0.0.1 localhost\n", encoding="utf-8")

    def own(self, volume: str, uid: int, gid: int, mode: int) -> None:
        """Make a volume and what is in it somebody's. What a link leads to may be of this machine, and stays."""
        (self.folder / volume).mkdir(exist_ok=True)
        for path in (self.folder / volume, *(self.folder / volume).rglob("*")):
            os.lchown(path, uid, gid)
            if not path.is_symlink():
                path.chmod(mode if path.is_dir() else mode & 0o666 | path.stat().st_mode & 0o111)

    @contextmanager
    def running(self, start: Start, *, without: str = "") -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """(the process that waits for the container's, its log). without: a capability that it has not."""
        image = TARGETS["runpod" if start.image.endswith("-runpod") else "trainer"]
        its = settings(image)
        uid, gid = start.user or map(int, its["User"].split(":"))
        rights = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if start.hardened else []
        rights += [f"--bounding-set=-{without}", f"--inh-caps=-{without}"] if without else []
        groups = ["--groups", str(start.group)] if start.group else ["--clear-groups"]
        environment = its["Env"] | {"HOME": "/root" if uid == 0 else "/home/trainer"} | dict(start.environment)
        environment |= dict(self.keys) if start.keys else {}
        words = [*(start.entrypoint or its["Entrypoint"]), *start.words]
        inside = [
            "setpriv", "--reuid", str(uid), "--regid", str(gid), *groups, *rights,
            "env", "-i", "-C", its["WorkingDir"], *(f"{name}={value}" for name, value in environment.items()), *words,
        ]  # fmt: skip
        self.count += 1
        log = self.folder / f"{self.count}.log"
        container = asked("buildah", "from", "--pull-never", image)
        try:
            root = asked("buildah", "mount", container)
            outside = [*self.network, "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
            with open(log, "wb") as written:
                process = subprocess.Popen(
                    [*outside, "bash", "-c", ENTER, "enter", root, "ro" if start.read_only else "rw", start.host, *inside],
                    stdin=subprocess.PIPE, stdout=written, stderr=written,
                    env=os.environ | {"hosts": str(self.folder / "hosts")},
                )  # fmt: skip
            assert process.stdin is not None
            lines = [f"{place} {kind if kind == TMPFS else self.folder / kind}\n" for place, kind in start.mounts.items()]
            process.stdin.write("".join(lines).encode())
            process.stdin.close()
            try:
                yield process, log
            finally:
                process.kill()
                process.wait()
        finally:
            asked("buildah", "rm", container)

    def run(self, start: Start, *, without: str = "") -> tuple[int, str]:
        """(exit status, all that it printed)."""
        with self.running(start, without=without) as (process, log):
            process.wait()
        return process.returncode, log.read_text(encoding="utf-8", errors="replace")

    def stopped(self, start: Start, metrics: Path) -> tuple[int, str]:
        """As `run`, but process 1 is sent SIGTERM when it has trained a step, as whoever takes the machine away does."""
        with self.running(start) as (process, log):
            while process.poll() is None and not (metrics.exists() and '"loss"' in metrics.read_text(encoding="utf-8")):
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            if process.poll() is None:
                os.kill(int(children.read_text(encoding="ascii").split()[0]), signal.SIGTERM)
            process.wait()
        return process.returncode, log.read_text(encoding="utf-8", errors="replace")

    def has(self, output: str) -> bool:
        """Whether a run left its adapter and its report."""
        folder = self.folder / output
        return any((folder / "adapters").glob("*.safetensors")) and (folder / "report.html").exists()


def config(name: str) -> str:
    """A short form of the demo's config, for photos in data/bear."""
    text = (ROOT / "configs" / "pocket_sdxl.toml").read_text(encoding="utf-8")
    changes = [
        ('"ink"', f'"{name}"'), ("outputs/ink", f"outputs/{name}"), ("max_steps = 90", "max_steps = 6"),
        ('"examples/icons/lessons"', '"data/bear"'), ("every_steps = 45", "every_steps = 3"), ('"examples', '"/app/examples'),
    ]  # fmt: skip
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text.partition("[validation]")[0]


# --- the scenes -------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What was otherwise than it should be."""


def expect(outcome: tuple[int, str], status: int, *texts: str) -> str:
    """The log. Raises `Wrong` where the status is another, or a text is not in the log."""
    if outcome[0] != status or not all(text in outcome[1] for text in texts):
        raise Wrong(f"status {outcome[0]}, not {status} with {texts}:\n{outcome[1][-3000:]}")
    return outcome[1]


def left(machine: Machine, output: str, uid: int | None = 1000) -> None:
    """Raises `Wrong` where a run did not leave its files there, as this user's."""
    if not machine.has(output):
        raise Wrong(f"no adapter or no report in {output}")
    if uid is not None and (owner := (machine.folder / output / "report.html").stat().st_uid) != uid:
        raise Wrong(f"{output} belongs to {owner}, not to {uid}")


def offered(text: str, name: str) -> str:
    """What a file offers for a mirror, with a bucket and a prefix that there are."""
    return text.replace("BUCKET/PREFIX", f"{object_store.BUCKET}/{name}")


def volumes(machine: Machine, start: Start) -> None:
    """As the recipe finds them: with a group of their own, or as the image's user's folders."""
    for kind in set(start.mounts.values()) - {TMPFS}:
        machine.own(kind, *((0, start.group, 0o2775) if start.group else (1000, 1000, 0o755)))


def demo(machine: Machine) -> str:
    start = replace(recipes.docker_run(), words=("--config", "pocket_sdxl.toml"))
    volumes(machine, start)
    expect(machine.run(start), 0)
    left(machine, "outputs/ink")
    touch = replace(start, entrypoint=("touch",), words=("/app/x", "/home/trainer/x", "/tmp/x", "/outputs/x"))
    log = expect(machine.run(touch), 1, "'/app/x': Read-only", "'/home/trainer/x': Read-only")
    return "the pocket demo, all of its steps; " + f"{log.count('Read-only')} places outside the volumes could not be written"


def one(machine: Machine, start: Start, file: str, name: str) -> str:
    """The command as it stands, then with the words that `file` offers for a mirror."""
    volumes(machine, start)
    expect(machine.run(start), 0)
    left(machine, "outputs/bear")
    mirrored = replace(start, words=(*start.words, *(offered(word, name) for word in recipes.mirror_words(file))))
    expect(machine.run(mirrored), 0)
    shutil.rmtree(machine.folder / "outputs" / "bear")
    expect(machine.run(mirrored), 0, "mirror")
    left(machine, "outputs/bear")
    return "trained; copied to its mirror with the recipe's keys, and fetched from there by an empty volume"


def stop_and_go(machine: Machine) -> str:
    (start,) = recipes.pods("kubernetes.yaml")
    volumes(machine, start)
    expect(machine.stopped(start, machine.folder / "outputs" / "bear" / "metrics.jsonl"), 143)
    log = expect(machine.run(start), 0, "resum")
    left(machine, "outputs/bear")
    return "SIGTERM to process 1: status 143; the next pod: " + next(line for line in log.splitlines() if "resum" in line)


def array(machine: Machine) -> str:
    starts = recipes.pods("kubernetes_array.yaml")
    volumes(machine, starts[0])
    for start in starts:
        expect(machine.run(start), 0)
    for start in starts:
        left(machine, f"outputs/bear-seed-{start.environment['JOB_COMPLETION_INDEX']}")
    return f"{len(starts)} pods, each with a seed and an output folder of its own"


def elastic(machine: Machine) -> str:
    starts = recipes.pods("kubernetes_elastic.yaml")
    volumes(machine, starts[0])
    addresses = {start.host: f"10.7.0.{number}" for number, start in enumerate(starts, 1)}
    lines = [f"{address} {host}.lora-elastic {host}\n" for host, address in addresses.items()]
    (machine.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines), encoding="utf-8")
    with network(addresses.values()) as machine.network, ExitStack() as pods:
        ran = [pods.enter_context(machine.running(start)) for start in starts]
        for process, _ in ran:
            process.wait()
    for process, log in ran:
        expect((process.returncode, log.read_text(encoding="utf-8")), 0)
    left(machine, "outputs/bear")
    return "two pods found each other by their names and trained as one run"


def runpod(machine: Machine) -> str:
    start, volume = recipes.runpod(machine.keys), machine.folder / "volume"

    def filled(mode: int) -> None:
        shutil.rmtree(volume, ignore_errors=True)
        shutil.copytree(machine.folder / "data", volume / "data")
        for name in ("cache", "outputs"):
            (volume / name).mkdir()
        machine.own("volume", 0, 0, mode)

    filled(0o755)
    words = (*start.words, *(offered(word, "runpod") for word in recipes.mirror_words("runpod.json")))
    expect(machine.run(replace(start, words=words)), 0)
    left(machine, "volume/outputs/bear")
    filled(0o755)
    expect(machine.run(recipes.runpod({})), 0, "this account has no secret for", "HF_TOKEN")
    left(machine, "volume/outputs/bear")
    # A volume whose owners cannot be changed.
    filled(0o755)
    log = expect(machine.run(start, without="chown"), 2, "error: /workspace/cache belongs to 0:0")
    filled(0o777)
    expect(machine.run(start, without="chown"), 0)
    left(machine, "volume/outputs/bear")
    (error,) = [line for line in log.splitlines() if line.startswith("error: ")]
    return f"on a volume of root, trained as user 1000, with a mirror, without secrets; where it cannot be given: {error}"


def wandb(machine: Machine) -> str:
    (start,) = recipes.pods("kubernetes.yaml")
    volumes(machine, start)
    start = replace(start, words=(*start.words, "--set", "logging.wandb=true"), environment={"WANDB_MODE": "offline"})
    expect(machine.run(start), 0)
    left(machine, "outputs/bear")
    return "logging.wandb = true, offline, below a read-only root"


@contextmanager
def network(addresses: Iterable[str]) -> Iterator[list[str]]:
    """What starts a command in a network of its own, which has these addresses. torchrun tells pods apart by theirs."""
    given = "; ".join(f"ip address add {address}/32 dev lo" for address in addresses)
    ready = ["unshare", "--net", "bash", "-ec", f"ip link set lo up; {given}; echo ready; exec sleep infinity"]
    with subprocess.Popen(ready, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
        finally:
            process.kill()


def clone(machine: Machine) -> Start:
    """A machine with the project in /project: its files, data/ and a .venv that finds the image's packages, so that the
    set-up fetches none of them again."""
    project = machine.folder / "project"
    for name in asked("git", "-C", ROOT, "ls-files").splitlines():
        if not name.startswith("tests/"):
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project / name)
    shutil.copytree(machine.folder / "data", project / "data")
    shutil.copy(machine.folder / "data" / "bear.toml", project / "data" / "fox.toml")
    machine.own("project", 0, 0, 0o755)
    (machine.folder / "certificates").symlink_to(CERTIFICATES)
    start = Start("lora-trainer", (), {"/project": "project", CERTIFICATES: "certificates"}, user=(0, 0), keys=True)
    prepare = """cd /project && python3 -m venv .venv
        python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .venv/lib/python3.11/site-packages/image.pth"""
    expect(machine.run(replace(start, entrypoint=("bash", "-ec", prepare))), 0)
    return start


def skypilot(machine: Machine) -> str:
    task = yaml.safe_load(recipes.text_of("skypilot.yaml"))
    start = clone(machine)
    for name in ("data", "outputs"):
        machine.own(name, 0, 0, 0o755)
    mounts = dict(start.mounts) | dict.fromkeys(task["file_mounts"], TMPFS) | {"/data": "data", "/outputs": "outputs"}
    start = replace(start, mounts=mounts, environment=task["envs"])
    expect(machine.run(replace(start, entrypoint=("bash", "-c", "cd /project && " + task["setup"]))), 0)
    expect(machine.run(replace(start, entrypoint=("bash", "-c", "cd /project\n" + task["run"]))), 0)
    left(machine, "outputs/bear", 0)
    (offer,) = re.findall(r"#.*(--set checkpoint.mirror=\S+)", task["run"])
    mirrored = task["run"].rstrip() + " " + offered(offer, "skypilot")
    expect(machine.run(replace(start, entrypoint=("bash", "-c", "cd /project\n" + mirrored))), 0)
    return "setup and run, and run with its mirror, whose library the set-up installed"


def slurm(machine: Machine) -> str:
    start = clone(machine)
    expect(machine.run(replace(start, entrypoint=("bash", "-c", "cd /project && bash scripts/setup.sh s3"))), 0)
    lines = [f"{name}={value}\n" for name, value in machine.keys.items()]
    (machine.folder / "project" / ".env").write_text("".join(lines), encoding="utf-8")
    machine.own("project", 1000, 1000, 0o755)
    start = replace(start, user=(1000, 1000), keys=False)
    runs = {
        "bear": ((), ("data/bear.toml",)),
        "bear-seed-3": ((("SLURM_ARRAY_TASK_ID", "3"),), ("data/bear.toml",)),
        "fox": ((("SLURM_ARRAY_TASK_ID", "1"),), ("data/bear.toml", "data/fox.toml")),
    }
    for name, (variables, configs) in runs.items():
        command = ("bash", "-c", 'cd /project && exec bash docker/clouds/slurm.sh "$@"', "slurm", *configs)
        expect(machine.run(replace(start, entrypoint=command, environment=dict(variables))), 0)
        left(machine, f"project/outputs/{name}")
    script = machine.folder / "project" / "docker" / "clouds" / "slurm.sh"
    text = script.read_text(encoding="utf-8")
    (offer,) = re.findall(r"^#   (words\+=.*checkpoint\.mirror.*)$", text, re.MULTILINE)
    script.write_text(text.replace(f"#   {offer}", offered(offer, "slurm")), encoding="utf-8")
    expect(machine.run(replace(start, entrypoint=command, environment=dict(variables))), 0)
    return f"{', '.join(runs)}: an output folder each; the last with its mirror, with the keys of .env"


SCENES: dict[str, Callable[[Machine], str]] = {
    "demo": demo,
    "docker run": lambda machine: one(machine, recipes.docker_run(), "compose.yaml", "docker"),
    "compose": lambda machine: one(machine, recipes.compose(), "compose.yaml", "compose"),
    "kubernetes": lambda machine: one(machine, recipes.pods("kubernetes.yaml")[0], "kubernetes.yaml", "kubernetes"),
    "stop": stop_and_go,
    "array": array,
    "elastic": elastic,
    "runpod": runpod,
    "wandb": wandb,
    "skypilot": skypilot,
    "slurm": slurm,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--torch", default="cu130", help="the build of PyTorch: cu130, cu126 or cpu")
    parser.add_argument("--only", choices=SCENES, action="append", help="of the scenes, this; may be given again")
    chosen = parser.parse_args(arguments)
    folder, wrong = chosen.folder.absolute(), 0
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print(f"base       {make_base(folder)}; {time.monotonic() - began:.0f} s", flush=True)
    for target in TARGETS:
        began = time.monotonic()
        build(target, chosen.torch)
        size = json.loads(asked("buildah", "images", "--json", TARGETS[target]))[0]["size"]
        print(f"built      {target}: {size}; {time.monotonic() - began:.0f} s", flush=True)
    with object_store.serve() as store:
        keys = {"HF_TOKEN": "hf_of_the_proof", "WANDB_API_KEY": "0" * 40} | store.environment()
        for name in chosen.only or SCENES:
            began = time.monotonic()
            machine = Machine(folder / name.replace(" ", "-"), keys)
            try:
                line = SCENES[name](machine)
            except Wrong as error:
                wrong += 1
                line = f"WRONG: {error}"
            print(f"{name:10} {line}; {time.monotonic() - began:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

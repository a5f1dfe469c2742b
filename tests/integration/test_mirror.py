"""A run with a mirror: a machine may be lost, a network may fail, and the run ends in the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import object_store
from tests.harness import Workbench, metrics_of
from tests.object_store import BUCKET, KEY, SECRET, ObjectStore, Trouble
from tests.proofs.forks import Order, Server
from trainer.base import files
from trainer.base.run_layout import Layout, folder_name
from trainer.checkpoint import store
from workbench.commands import main as cli

pytestmark = pytest.mark.tool("mirror")

TIMEOUT = 60  # seconds until a test that hangs fails


@pytest.fixture(scope="module")
def moto() -> Iterator[ObjectStore]:
    with object_store.serve() as serving:
        yield serving


@pytest.fixture
def s3(moto: ObjectStore, monkeypatch) -> Iterator[ObjectStore]:
    """With the right keys, and no fault."""
    moto.use(monkeypatch)
    moto.fault = lambda method, name: ""
    moto.asked.clear()
    yield moto
    moto.fault = lambda method, name: ""


def tree_of(bench: Workbench, prefix: str = "", **overrides) -> dict:
    mirror = {"checkpoint__mirror": f"s3://{BUCKET}/{prefix}", "checkpoint__mirror_wait": 30.0} if prefix else {}
    tree = bench.tree(
        "flux",
        **{
            "run__max_steps": 4, "checkpoint__every_steps": 1, "checkpoint__keep_last": 2,
            "adapter__targets": ["*attn.to_q"], "validation__every_steps": 2, "validation__steps": 1,
            "validation__prompts": ["a bear"], "export__every_steps": 2, "export__formats": ["diffusers"],
            "ema__kind": "constant",
        } | mirror | overrides
    )  # fmt: skip
    return tree


def start(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


def results(out: Path) -> dict[str, bytes]:
    """What a run leaves and promises byte by byte. The card and the report are for people; the config names the mirror."""
    kinds = {".safetensors", ".png"}
    paths = [path for path in out.rglob("*") if path.suffix in kinds and "truth" not in path.parts]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(paths)}


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_lost_machine_and_a_bad_network_end_in_the_same_bytes(bench: Workbench, s3: ObjectStore, capfd) -> None:
    """Cut connections up and down, 503s and slow answers; then all that the first machine had is gone."""
    assert start(bench, tree_of(bench, run__output_dir=str(bench.tmp / "whole"))) == 0
    s3.fault = trouble = Trouble("503", "cut up", "slow", "cut down")
    tree = tree_of(bench, "lost", run__stop_after=3)
    assert start(bench, tree, "--resume_from", "auto") == 0
    there = s3.objects("lost/checkpoints/")
    assert {name.split("/")[2] for name in there} == {folder_name(2), folder_name(3)}, "keep_last holds there, too"
    shutil.move(bench.tmp / "out", bench.tmp / "first")
    del tree["run"]["stop_after"]
    tree["data"]["num_workers"] = 2  # forks of a process whose threads copy
    capfd.readouterr()
    assert start(bench, tree, "--resume_from", "auto") == 0
    assert "step-00000003 came from s3://bucket/lost" in capfd.readouterr().out
    s3.fault = lambda method, name: ""
    assert {kind for kind, *_ in trouble.met} == {*trouble.kinds}
    out, whole = bench.tmp / "out", bench.tmp / "whole"
    assert results(out) == results(whole) and metrics_of(out) == metrics_of(whole)
    mirrored = {name.removeprefix("lost/"): data for name, data in s3.objects("lost/").items()}
    for name, data in {**results(out), "report.html": (out / "report.html").read_bytes()}.items():
        assert mirrored.pop(name) == data, name
    assert not [name for name in mirrored if name.endswith(".safetensors")], mirrored.keys()
    assert not [name for name in mirrored if name.endswith(".tmp")]
    # The keys stand nowhere: in no file here or there, and no line.
    assert any(f"Credential={KEY}/" in head for head in s3.heads)
    for secret in (KEY, SECRET):
        assert not files_with(secret, bench.tmp)
        assert not [name for name, data in s3.objects().items() if secret.encode() in data]


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_copy_leaves_the_checkpoint_before(
    bench: Workbench, s3: ObjectStore, server: Server, capsys
) -> None:
    assert start(bench, tree_of(bench, run__output_dir=str(bench.tmp / "whole"))) == 0
    assert start(bench, tree_of(bench, "killed", run__stop_after=1)) == 0
    tree, hangs, go_on = tree_of(bench, "killed", run__stop_after=3), [], threading.Event()

    def fault(method: str, name: str) -> str:
        if method == "PUT" and name == f"killed/checkpoints/{folder_name(3)}/optimizer.safetensors":
            hangs.append(name)
            go_on.wait(TIMEOUT)
        return ""

    s3.fault = fault
    (bench.tmp / "life").mkdir()
    config = str(bench.write(tree, "life.toml"))
    arguments = {"arguments": ["--config", config, "--resume_from", "auto"]}
    environment = s3.environment() | {"SOURCE_DATE_EPOCH": os.environ["SOURCE_DATE_EPOCH"]}
    order = {"call": "tests.integration.test_mirror:life", "folder": str(bench.tmp / "life")}
    pid = server.start(Order(**order, arguments=arguments | {"environment": environment}))
    limit = time.monotonic() + TIMEOUT
    while not hangs:
        assert time.monotonic() < limit, "it copies nothing"
        assert server.status(pid) is None, (bench.tmp / "life" / "log").read_text()
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    assert server.wait(pid) == -signal.SIGKILL
    go_on.set()
    s3.fault = lambda method, name: ""
    there = {name.partition("/checkpoints/")[2] for name in s3.objects("killed/checkpoints/")}
    left = [step for step in (1, 2, 3) if f"{folder_name(step)}/manifest.json" in there]
    assert left and left[-1] < 3 and f"{folder_name(3)}/adapter.safetensors" in there
    shutil.move(bench.tmp / "out", bench.tmp / "first")
    del tree["run"]["stop_after"]
    assert start(bench, tree, "--resume_from", "auto") == 0
    assert f"{folder_name(left[-1])} came from" in capsys.readouterr().out
    assert results(bench.tmp / "out") == results(bench.tmp / "whole")
    manifests = {name.split("/")[2] for name in s3.objects("killed/checkpoints/") if name.endswith("manifest.json")}
    assert manifests == {folder_name(3), folder_name(4)}, "what the kill left is made whole"


def life(arguments: list[str], environment: dict[str, str]) -> int:
    """A start of the program, in a fork."""
    os.environ.update(environment)
    return cli.main(arguments)


@pytest.mark.slow
def test_an_end_without_a_network_is_an_end(bench: Workbench, s3: ObjectStore, capsys) -> None:
    """From step 2 on nothing answers: the run ends as if nothing was, and its last line says what is missing. The next start
    copies it."""
    s3.fault = lambda method, name: "503" if any(folder_name(2) in seen for _, seen in s3.asked) else ""
    tree = tree_of(bench, "alone", checkpoint__mirror_wait=4.0)
    assert start(bench, tree, "--resume_from", "auto") == 0
    said = capsys.readouterr().out
    warning = next(line for line in said.splitlines() if " lacks " in line)
    assert warning.startswith("warning: s3://bucket/alone lacks step-00000004, step-00000003")
    for part in ("adapters/bear.safetensors", "report.html", "after 4.0 s (checkpoint.mirror_wait)", "--resume_from auto"):
        assert part in warning
    assert said.count("fails (") == 1, "once a minute"
    assert store.steps(Layout(bench.tmp / "out").checkpoints) == [3, 4]
    s3.fault = lambda method, name: ""
    tree["checkpoint"]["mirror_wait"] = 30.0
    assert start(bench, tree, "--resume_from", "auto") == 0
    there = s3.objects("alone/")
    for name in (f"checkpoints/{folder_name(4)}/manifest.json", "adapters/bear.safetensors", "report.html"):
        assert there[f"alone/{name}"] == (bench.tmp / "out" / name).read_bytes()


@pytest.mark.parametrize(
    ("prefix", "change", "expected"),
    [
        ("keys", "keys", ("'s3://bucket/keys' cannot be used (", "Forbidden", "give keys that may list, read")),
        ("deny", "403", ("'s3://bucket/deny' cannot be used (trying to write): Access Denied", "give keys that may")),
        ("down", "503", ("'s3://bucket/down' cannot be used (", "start again when it answers")),
        ("photos", "other", ("holds something else than a run ('holiday.jpg')", "give an empty place")),
        ("cat", "run", ("'s3://bucket/cat' holds another run ('cat', of another run.output_dir)", "another prefix")),
        ("../nowhere", "", ("'s3://bucket/../nowhere' cannot be used (", )),
    ],
)  # fmt: skip
def test_a_mirror_that_cannot_be_written_is_refused_before_a_weight(
    bench: Workbench, s3: ObjectStore, monkeypatch, capfd, prefix: str, change: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr("trainer.run.session.build", lambda *_, **__: pytest.fail("a weight is read"))
    tree = tree_of(bench, prefix, checkpoint__mirror_wait=0.0)
    if change == "keys":
        s3.use(monkeypatch, key="AKIAWRONGWRONG", secret="hush/hush+hush/hush")
    elif change == "other":
        s3.put("photos/holiday.jpg", b"a photo")
    elif change == "run":
        s3.put("cat/run.json", b'{"id": "1", "run": "cat"}')
    elif change:
        s3.fault = lambda method, name: change if method == "PUT" or change == "503" else ""
    if prefix.startswith(".."):
        tree["checkpoint"]["mirror"], expected = "s3://no-such-bucket/a", (
            "'s3://no-such-bucket/a' cannot be used (trying to write): ", "make the bucket or folder"
        )  # fmt: skip
    before = s3.objects()
    assert start(bench, tree, "--resume_from", "auto") == 2
    captured = capfd.readouterr()
    assert captured.err.count("error: ") == 1 and "Traceback" not in captured.err
    for part in expected:
        assert part in captured.err
    for secret in ("AKIAWRONGWRONG", "hush/hush", KEY, SECRET):
        assert secret not in captured.out + captured.err and not files_with(secret, bench.tmp)
    assert s3.objects() == before and not (bench.tmp / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("log", ["of an earlier version", "altered"])
def test_a_checkpoint_without_a_digest_of_its_log_is_gone_on_from_and_an_altered_log_is_named(
    bench: Workbench, s3: ObjectStore, capfd, log: str
) -> None:
    assert start(bench, tree_of(bench, run__output_dir=str(bench.tmp / "whole"))) == 0
    prefix = f"log-{log.split()[0]}"
    tree = tree_of(bench, prefix, run__stop_after=2)
    assert start(bench, tree, "--resume_from", "auto") == 0
    shutil.rmtree(bench.tmp / "out")
    place = f"{prefix}/checkpoints/{folder_name(2)}"
    there = s3.objects(place)
    if log == "altered":
        s3.put(f"{place}/metrics.jsonl", there[f"{place}/metrics.jsonl"].replace(b'"loss": ', b'"loss": 1', 1))
    else:
        state = json.loads(there[f"{place}/state.json"])
        assert len(state["pieces"]["progress"]["state"].pop("log")) == 64
        manifest = json.loads(there[f"{place}/manifest.json"])
        data = files.json_bytes(state)
        manifest["files"]["state.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        s3.put(f"{place}/state.json", data)
        s3.put(f"{place}/manifest.json", files.json_bytes(manifest))
    del tree["run"]["stop_after"]
    capfd.readouterr()
    assert start(bench, tree, "--resume_from", "auto") == 0
    named = "metrics.jsonl of step-00000002 in s3://bucket/" in capfd.readouterr().out
    out, whole = bench.tmp / "out", bench.tmp / "whole"
    assert results(out) == results(whole)
    lines = metrics_of(whole)
    assert (named, metrics_of(out)) == ((True, lines[2:]) if log == "altered" else (False, lines))


def test_a_store_that_accepts_and_never_answers_is_refused_in_time(
    bench: Workbench, s3: ObjectStore, monkeypatch, capfd
) -> None:
    monkeypatch.setattr("workbench.mirror.copier.SHORTEST_SILENCE", 0.3)
    s3.fault = lambda method, name: "silent"
    assert start(bench, tree_of(bench, "silent", checkpoint__mirror_wait=0.3), "--resume_from", "auto") == 2
    said = capfd.readouterr().err
    assert (
        "'s3://bucket/silent' cannot be used (asking whose it is): [Errno 110] no answer for 0.3 s\n" in said
        and "start again when it" in said
    )


def test_keys_in_the_url_are_refused_and_not_printed(bench: Workbench, capfd) -> None:
    for url in (
        "s3://me:hush-hush@bucket/run", "abfs://box/run?sig=hush-hush", "s3://me:1/hush-hush/2@bucket/run",
        "s3://me:1@hush-hush@bucket/run", "s3:/me:hush-hush@bucket/run", "simplecache::ftp://me:hush-hush@host/run",
        "zip://a.zip::s3://me:hush-hush@bucket/run", "simplecache::abfs://box/run?sig=hush-hush",
    ):  # fmt: skip
        assert start(bench, bench.tree("flux", checkpoint__mirror=url)) == 2
        assert start(bench, bench.tree("flux"), "--set", f'checkpoint.mirror="{url}') == 2
        captured = capfd.readouterr()
        assert "hush-hush" not in captured.out + captured.err and not files_with("hush-hush", bench.tmp / "out")
        assert "checkpoint.mirror = '" in captured.err and "keys do not belong in a URL" in captured.err
    for url, why in (
        ("memory://bucket/run", "memory:// ends with the process"),
        ("simplecache::s3://bucket/run", "give the URL of the store alone"),
        (
            "https://bucket.s3.amazonaws.com/run",
            'https:// cannot be written to; give the bucket itself, for example "s3://BUCKET/PREFIX"',
        ),
    ):
        assert start(bench, bench.tree("flux", checkpoint__mirror=url)) == 2
        assert why in capfd.readouterr().err
    for url in ("bucket/run", "s3://", "s3:///"):
        assert start(bench, bench.tree("flux", checkpoint__mirror=url)) == 2
        assert 'give a URL and a place in it, for example "s3://BUCKET/PREFIX"' in capfd.readouterr().err

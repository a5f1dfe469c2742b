"""A mirror: wherever a copy is cut off, what looks like a checkpoint there is one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec  # noqa: F401
import pytest

from tests.faulty_store import FaultyStore
from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout, folder_name
from trainer.checkpoint import store
from trainer.checkpoint.state import LAYOUT_VERSION, PIECES
from workbench.mirror.store import INSIDE, Claimed, adopt, check_library, open_mirror

LOG = b'{"step": 1}\n'


def saved(root: Path, step: int, mark: str = "", log: str = "") -> Path:
    """A checkpoint on the disk. mark: makes its bytes others. log: the digest of its log; "" of an earlier version's."""
    pieces = {name: {"version": piece.version, "state": {}} for name, piece in PIECES.items()}
    pieces["progress"]["state"] = {"log": log} if log else {}
    contents = {"adapter.safetensors": [f"weights {step} {mark}".encode()], "optimizer.safetensors": [b"x" * 100 * step],
                "state.json": [files.json_bytes({"layout": LAYOUT_VERSION, "pieces": pieces})]}  # fmt: skip
    return store.save(root, step, contents)


def whole(fs: FaultyStore, folder: Path) -> list[int]:
    """The steps that are there, each fetched and found valid. Half of a manifest, which some stores keep, is seen by itself;
    with a whole one all is whole."""
    fs.fails = lambda what, name: False
    steps = []
    for step in fs.mirror().steps():
        into = folder / f"{len(fs.asked)}-{step}"
        into.mkdir(parents=True)
        fs.mirror().fetch(step, into)
        reason = store.problem(into)
        assert reason is None or reason.startswith("manifest.json is damaged"), reason
        steps += [step] if reason is None else []
    return steps


def at_call(number: int):
    """Fails at the call of that number, and at all after it, as if the process was killed there."""
    left = [number]

    def fails(what: str, name: str) -> bool:
        left[0] -= 1
        return left[0] < 0

    return fails


def test_the_manifest_comes_last_and_the_log_before_it(tmp_path: Path) -> None:
    fs, folder = FaultyStore(), saved(tmp_path, 5)
    fs.mirror().put(folder, 5, LOG)
    place = f"checkpoints/{folder_name(5)}"
    names = ["adapter.safetensors", "optimizer.safetensors", "state.json", "metrics.jsonl", "manifest.json"]
    assert fs.changes() == [("write", f"{place}/{name}") for name in names]
    assert fs.mirror().read(f"{place}/metrics.jsonl") == LOG


def test_a_copy_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    fs, folder = FaultyStore(), saved(tmp_path, 5)
    fs.mirror().put(folder, 5, LOG)
    fs.asked.clear()
    fs.mirror().put(folder, 5, LOG)
    assert not fs.changes()


def test_wherever_a_copy_is_cut_off_no_half_one_looks_whole(tmp_path: Path) -> None:
    """At every call: of a new checkpoint, of one in place of other bytes, of one over a half copy, and of the pruning."""
    first, second, other = (saved(tmp_path / name, step, name) for name, step in (("a", 1), ("b", 2), ("c", 2)))
    calls, ends = 0, set()
    while True:
        fs = FaultyStore()
        fs.mirror().put(first, 1, LOG)
        fs.fails = at_call(calls)
        try:
            fs.mirror().put(second, 2, LOG)
            fs.mirror().put(other, 2, LOG)
            fs.mirror().prune(1)
            assert whole(fs, tmp_path / f"end{calls}") == [2]
            break
        except OSError:
            pass
        steps = whole(fs, tmp_path / f"cut{calls}")
        assert steps in ([1], [1, 2], [2]), f"after {calls} calls"
        ends.add(tuple(steps))
        # Whoever comes next ends with the whole of it, and without leftovers.
        again = fs.mirror()
        again.put(other, 2, LOG)
        again.prune(1)
        assert whole(fs, tmp_path / f"again{calls}") == [2]
        assert {name.split("/")[1] for name in again.listing("checkpoints")} == {folder_name(2)}
        assert again.read(f"checkpoints/{folder_name(2)}/adapter.safetensors") == b"weights 2 c"
        calls += 1
    assert calls > 20 and ends == {(1,), (1, 2), (2,)}


def test_another_checkpoint_of_the_step_loses_its_manifest_first(tmp_path: Path) -> None:
    fs = FaultyStore()
    fs.mirror().put(saved(tmp_path / "a", 5), 5, LOG)
    fs.asked.clear()
    fs.mirror().put(saved(tmp_path / "b", 5, "other"), 5, LOG)
    changes = fs.changes()
    manifest = f"checkpoints/{folder_name(5)}/manifest.json"
    assert changes[0] == ("remove", manifest) and changes[-1] == ("write", manifest) and len(changes) == 6


def test_a_copy_that_was_cut_off_goes_on_and_a_file_that_came_short_is_sent_again(tmp_path: Path) -> None:
    fs, folder = FaultyStore(), saved(tmp_path, 5)
    mirror = fs.mirror()
    fs.fails = lambda what, name: name.endswith("optimizer.safetensors")
    with pytest.raises(OSError, match="cut"):
        mirror.put(folder, 5, LOG)
    assert mirror.listing()[f"checkpoints/{folder_name(5)}/optimizer.safetensors"] == 250
    fs.fails = lambda what, name: False
    fs.asked.clear()
    mirror.put(folder, 5, LOG)
    sent = [name.rpartition("/")[2] for what, name in fs.changes()]
    assert sent == ["optimizer.safetensors", "state.json", "metrics.jsonl", "manifest.json"]
    assert whole(fs, tmp_path / "read") == [5]


def test_a_store_that_swallows_bytes_gets_no_manifest(tmp_path: Path, monkeypatch) -> None:
    fs, folder = FaultyStore(), saved(tmp_path, 5)
    monkeypatch.setattr(fs, "cut", lambda failed: None)
    fs.fails = lambda what, name: (what, name.endswith("optimizer.safetensors")) == ("write", True)
    with pytest.raises(OSError, match=r"optimizer\.safetensors did not arrive whole"):
        fs.mirror().put(folder, 5, LOG)
    assert fs.mirror().steps() == []


def test_keep_last_holds_and_of_what_goes_the_manifest_goes_first(tmp_path: Path) -> None:
    fs = FaultyStore()
    for step in range(1, 6):
        fs.mirror().put(saved(tmp_path, step), step, LOG)
    half = f"checkpoints/{folder_name(3)}"
    fs.mirror().remove([f"{half}/manifest.json"])
    later = f"checkpoints/{folder_name(9)}/state.json"  # being copied, perhaps
    fs.mirror().write(later, b"{}")
    fs.asked.clear()
    fs.mirror().prune(2)
    assert fs.mirror().steps() == [4, 5] and later in fs.mirror().listing()
    gone = [name for what, name in fs.changes()]
    assert {name.split("/")[1] for name in gone} == {folder_name(step) for step in (1, 2, 3)}
    for step in (1, 2):
        assert next(name for name in gone if folder_name(step) in name).endswith("/manifest.json")


def test_later_checkpoints_are_set_aside_with_all_their_bytes(tmp_path: Path) -> None:
    fs = FaultyStore()
    for step in (1, 2, 3):
        fs.mirror().put(saved(tmp_path, step), step, LOG)
    fs.asked.clear()
    assert fs.mirror().set_aside(1) == [f"checkpoints/superseded-{folder_name(step)}" for step in (2, 3)]
    assert fs.mirror().steps() == [1]
    assert [name for what, name in fs.changes() if what == "remove"][0] == f"checkpoints/{folder_name(2)}/manifest.json"
    fs.mirror().prune(1)
    moved = f"checkpoints/superseded-{folder_name(3)}"
    assert sorted(name for name in fs.mirror().listing() if name.startswith(moved)) == [
        f"{moved}/{name}" for name in
        ("adapter.safetensors", "manifest.json", "metrics.jsonl", "optimizer.safetensors", "state.json")
    ]  # fmt: skip


def test_what_cannot_be_listed_is_not_taken_for_empty() -> None:
    """fsspec's own `find` would."""
    fs = FaultyStore()
    fs.mirror().write("samples/step-00000001/00.png", b"png")
    fs.fails = lambda what, name: (what, name) == ("list", "samples/step-00000001")
    with pytest.raises(OSError, match="cut"):
        fs.mirror().listing()
    fs.fails = lambda what, name: False
    assert fs.mirror().listing() == {"samples/step-00000001/00.png": 3} and fs.mirror().listing("checkpoints") == {}


def test_an_owner_is_told_nobody_is_none_and_something_else_is_refused() -> None:
    owner = {"run": "bear", "id": "5"}
    fs = FaultyStore()
    assert fs.mirror().owner() is None
    fs.mirror().write("probe.tmp", b"left by a kill")
    assert fs.mirror().owner() is None
    fs.mirror().claim(owner)
    assert fs.mirror().owner() == owner
    for half in (b"", b"[]", b'{"run": "be'):
        fs = FaultyStore()
        fs.mirror().write("run.json", half)
        assert fs.mirror().owner() is None, "a kill left it: it is the first file"
        fs.mirror().write("holiday.jpg", b"a photo")
        with pytest.raises(UserError, match=r"holds something else than a run \('holiday.jpg'\); give an empty place"):
            fs.mirror().owner()


def test_of_two_starts_the_last_has_the_place_and_the_other_writes_no_manifest(tmp_path: Path) -> None:
    """Also where the second claims it while the first is in the middle of a copy."""
    fs, folder = FaultyStore(), saved(tmp_path, 5)
    first, second = fs.mirror(), fs.mirror()
    first.claim({"run": "bear", "id": "5", "start": "a"})
    first.hold()

    def claimed_meanwhile(what: str, name: str) -> bool:
        if (what, name) == ("write", f"checkpoints/{folder_name(5)}/state.json"):
            fs.fails = lambda what, name: False
            second.claim({"run": "bear", "id": "5", "start": "b"})
        return False

    fs.fails = claimed_meanwhile
    with pytest.raises(Claimed):
        first.put(folder, 5, LOG)
    assert fs.mirror().steps() == []
    second.put(folder, 5, LOG)
    for again in (first.hold, lambda: first.claim({"run": "bear", "id": "5", "start": "a"})):
        with pytest.raises(Claimed):
            again()
    second.hold()
    assert fs.mirror().steps() == [5] and fs.mirror().owner() == {"run": "bear", "id": "5"}


def test_a_claim_that_somebody_deleted_is_said_again() -> None:
    fs = FaultyStore()
    mirror = fs.mirror()
    mirror.claim({"run": "bear", "id": "5"})
    mirror.remove(["run.json"])
    mirror.hold()
    assert fs.mirror().owner() == {"run": "bear", "id": "5"}


def test_two_that_try_out_at_one_moment_are_in_nobodys_way() -> None:
    fs = FaultyStore()

    def other(what: str, name: str) -> bool:
        if what == "read":
            fs.mirror().remove(["probe.tmp"])
        return False

    fs.fails = other
    fs.mirror().try_out()
    assert ("read", "probe.tmp") in fs.asked and fs.mirror().listing() == {}


def test_trying_out_leaves_nothing_and_needs_to_write_read_and_delete() -> None:
    fs = FaultyStore()
    fs.mirror().try_out()
    assert fs.mirror().listing() == {}
    for refused in ("write", "read", "remove"):
        fs.fails = lambda what, name, refused=refused: what == refused
        with pytest.raises(OSError, match="cut"):
            fs.mirror().try_out()


def test_a_fetch_that_is_cut_short_is_no_checkpoint_and_raises(tmp_path: Path, monkeypatch) -> None:
    fs = FaultyStore()
    fs.mirror().put(saved(tmp_path / "there", 5), 5, LOG)
    fs.fails = lambda what, name: (what, name.endswith("optimizer.safetensors")) == ("get", True)
    monkeypatch.setattr(fs, "cut", lambda failed: None)  # the connection ends as if all had come
    with pytest.raises(OSError, match="250 of 500 bytes came"):
        adopt(tmp_path / "here", 5, lambda into: fs.mirror().fetch(5, into), lambda folder: None)
    assert list((tmp_path / "here").iterdir()) == []


def test_what_is_taken_in_is_valid_or_not_there(tmp_path: Path) -> None:
    fs, here = FaultyStore(), tmp_path / "here"
    fs.mirror().put(saved(tmp_path / "there", 5), 5, LOG)
    saved(here, 4)
    damaged = saved(here, 5) / "state.json"
    damaged.write_bytes(b"[]")
    kept: list[str] = []

    def take() -> str | None:
        def keep(folder: Path) -> None:
            assert store.problem(folder) is None and store.problem(here / folder_name(5)) is not None
            kept.extend(sorted(path.name for path in folder.iterdir()))

        return adopt(here, 5, lambda into: fs.mirror().fetch(5, into), keep)

    assert take() is None and store.problem(here / folder_name(5)) is None
    assert "metrics.jsonl" in kept and store.steps(here) == [4, 5]
    fs.mirror().write(f"checkpoints/{folder_name(5)}/state.json", b"[]")
    damaged.write_bytes(b"[]")
    assert "state.json has 2 bytes" in str(take())
    assert store.steps(here) == [4, 5] and [path for path in here.iterdir() if path.name.startswith(".")] == []


def test_what_was_set_aside_here_does_not_come_back(tmp_path: Path) -> None:
    fs, here = FaultyStore(), tmp_path / "here"
    fs.mirror().put(saved(here, 5), 5, LOG)
    store.set_aside(here, after=4)

    def take() -> str | None:
        return adopt(here, 5, lambda into: fs.mirror().fetch(5, into), lambda folder: None)

    assert take() == "the run went back from it, and set it aside here" and store.steps(here) == []
    fs.mirror().put(saved(tmp_path / "new", 5, "of the new timeline"), 5, LOG)
    assert take() is None and store.steps(here) == [5]


def test_results_come_up_to_the_step_and_nothing_outside_of_them(tmp_path: Path) -> None:
    fs, layout = FaultyStore(), Layout(tmp_path / "out")
    there = {
        "ema/step-00000002.safetensors": False,  # no folder of results any more
        "samples/step-00000000/00.png": True, "samples/truth/00.png": True, "samples/step-00000003/00.png": False,
        "adapters/bear-00000002_comfyui.safetensors": True, "adapters/bear-00000003.safetensors": False,
        "adapters/bear.safetensors": False, "report.html": False, "config.toml": False,
        "adapters/cat-00000001.safetensors": False,
    }  # fmt: skip
    for name in there:
        fs.mirror().write(name, name.encode())
    layout.samples_of(0).mkdir(parents=True)
    (layout.samples_of(0) / "00.png").write_bytes(b"own")
    fs.mirror().fetch_results(layout, "bear", 2)
    came = {path.relative_to(layout.root).as_posix(): path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}
    assert came == {name: name.encode() for name, comes in there.items() if comes} | {"samples/step-00000000/00.png": b"own"}
    assert layout.results("bear") == {name: INSIDE.step_of_result(name, "bear") for name in sorted(came)}


def test_a_folder_of_this_machine_is_a_mirror_too(tmp_path: Path) -> None:
    mirror = open_mirror(f"file://{tmp_path}/a mirror")
    mirror.try_out()
    mirror.claim({"run": "bear", "id": "5"})
    mirror.put(saved(tmp_path, 5), 5, LOG)
    assert mirror.steps() == [5] and json.loads((tmp_path / "a mirror" / "run.json").read_bytes())["run"] == "bear"


def test_what_is_not_installed_is_named_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # fsspec remembers what it has imported: asked as if it had not yet.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        UserError, match=r"'s3://a/b' needs a library that is not there: Install s3fs.*pip install -e '\.\[s3\]'"
    ):
        check_library("s3://a/b")
    with pytest.raises(UserError, match="fsspec knows no s4://; give one of s3, "):
        check_library("s4://a/b")

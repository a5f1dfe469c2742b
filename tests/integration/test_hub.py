"""Models from the hub, against a stand-in on the loopback: what is chosen, fetched, kept when it breaks off, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import hub as stand_in
from tests.harness import ROOT, Workbench
from trainer import config as configs
from trainer.base.errors import Interrupted, UserError
from trainer.base.progress import Phases, Record
from trainer.base.tensorfile import TensorFile
from trainer.models import FAMILIES
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.commands import main as cli
from workbench.hub import hub
from workbench.summary.plan import describe

ID = "someone/sdxl"
UNET, FP16 = "unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors"
# By default: fp32 is stored and computed by the VAE alone, the others are stored in 16 bit.
CHOSEN = {
    "text_encoder/model.fp16.safetensors", "text_encoder_2/model.fp16.safetensors", FP16,
    "vae/diffusion_pytorch_model.safetensors",
}  # fmt: skip


@pytest.fixture(scope="module")
def both(models: Path, tmp_path_factory) -> Path:
    """Tiny SDXL with fp32 files, and fp16 variants that hold the halved values."""
    return stand_in.with_variants(models / "sdxl", tmp_path_factory.mktemp("hub") / "both")


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(hub, "RETRY_AFTER", 0.0)


def open_hub(bench: Workbench, hub_id: str = ID, **overrides):
    return open_source(bench.config(model__path=hub_id, **{"precision__compute": "bf16", **overrides}), hub)


def fetch(source, **how):
    return source.fetch(phases=Phases(**how))


def partials(home: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in home.rglob("*.incomplete")}


@pytest.mark.slow
def test_only_the_chosen_files_are_fetched_once(bench: Workbench, both: Path, monkeypatch) -> None:
    record = Record()
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        source = open_hub(bench)
        assert served.weights_sent() == [] and not source.fetched
        assert source.to_fetch() == sum((both / name).stat().st_size for name in CHOSEN)
        wanted = source.to_fetch()
        fetched = fetch(source, record=record)
        assert set(served.weights_sent()) == CHOSEN
        record.open(bench.tmp / "phases.jsonl")
        phase = json.loads((bench.tmp / "phases.jsonl").read_text())
        assert (phase["phase"], phase["done"], phase["unit"]) == (f"downloading {ID}", wanted, "B")
        for name in CHOSEN:
            assert (fetched.root / name).read_bytes() == (both / name).read_bytes()
        assert partials(bench.tmp / "home") == {}
        served.asked.clear()
        assert open_hub(bench).fetched and not served.asked
        # Another dtype: what it lacks, and no more.
        exact = open_hub(bench, precision__compute="fp32")
        assert not exact.fetched
        fetch(exact)
        assert set(served.weights_sent()) == {UNET, "text_encoder/model.safetensors", "text_encoder_2/model.safetensors"}
    # The stand-in is gone: what is here serves, and is chosen by the same rule.
    for compute, taken in (("bf16", FP16), ("fp32", UNET)):
        alone = open_hub(bench, precision__compute=compute)
        assert alone.fetched and alone.weights("unet").files[0].path == alone.root / taken


def test_a_push_while_it_is_fetched_mixes_nothing(bench: Workbench, both: Path, monkeypatch) -> None:
    """Of the commit that was listed at the start come its files, and its name stays the one that is found offline."""
    other = shutil.copytree(both, bench.tmp / "pushed")
    changed = ("unet/config.json", "scheduler/scheduler_config.json")
    for name in changed:
        (other / name).write_text((other / name).read_text() + " ")
    shutil.copy(both / "text_encoder/model.safetensors", other / "text_encoder/model.fp16.safetensors")
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        source, commit = open_hub(bench), served.commit(ID)
        served.push(ID, other)
        fetched = fetch(source)
        assert fetched.root.name == commit != served.commit(ID)
        for name in (*CHOSEN, *changed):
            assert (fetched.root / name).read_bytes() == (both / name).read_bytes()
    alone = open_hub(bench)
    assert alone.fetched and alone.root == fetched.root


def test_a_revision_pins_what_is_fetched(bench: Workbench, both: Path, monkeypatch) -> None:
    """By a tag, a branch or a commit, also from the cache alone; a start without one gets the newest."""
    other = shutil.copytree(both, bench.tmp / "pushed")
    (other / "unet/config.json").write_text((other / "unet/config.json").read_text() + " ")
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        served.tag(ID, "v1/first")
        first = served.commit(ID)
        served.push(ID, other)
        for revision in ("v1/first", first):
            pinned = fetch(open_hub(bench, model__revision=revision))
            assert pinned.root.name == first
            assert (pinned.root / "unet/config.json").read_bytes() == (both / "unet/config.json").read_bytes()
        newest = fetch(open_hub(bench))
        assert newest.root.name == served.commit(ID) != first
        with pytest.raises(UserError, match=f"model.revision = 'v2': {ID} has no such branch, tag or commit"):
            open_hub(bench, model__revision="v2")
    for revision, commit in (("v1/first", first), (first, first), (None, newest.root.name)):  # the stand-in is gone
        alone = open_hub(bench, model__revision=revision)
        assert alone.fetched and alone.root.name == commit
    digest = lambda path: path.read_bytes().hex()  # noqa: E731
    assert newest.contents((), digest) == pinned.contents((), digest), "the same run: what the configs say is the same"


def test_a_repository_without_a_default_branch_is_told_so(bench: Workbench, both: Path, monkeypatch) -> None:
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        monkeypatch.setattr(served, "at", lambda hub_id, revision: None)
        said = rf"model.path = '{ID}': the hub has no default branch \(main\) of it; name one .* with model.revision$"
        with pytest.raises(UserError, match=said):
            open_hub(bench)


def test_a_revision_of_what_is_no_repository_is_refused(bench: Workbench) -> None:
    with pytest.raises(UserError, match=r"model.revision = 'v1' belongs to a hub id; model.path = .* is here, leave it out"):
        open_hub(bench, str(bench.models / "sdxl"), model__revision="v1")
    for wrong in ("../v1", "a//b", ".v1", ""):
        with pytest.raises(UserError, match="model.revision = .*write a branch, a tag or a commit"):
            bench.config(model__revision=wrong)


def test_a_local_copy_gives_the_same_choice(bench: Workbench, both: Path, monkeypatch) -> None:
    local = shutil.copytree(both, bench.tmp / "copy")
    stand_in.split(local / FP16)
    with stand_in.serve({ID: local}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        for components in ({}, {"unet": {"dtype": "fp32"}}, {"vae": {"dtype": "bf16"}}, {"unet": {"compute": "fp32"}}):
            remote = open_hub(bench, model__components=components)
            copied = open_hub(bench, hub_id=str(local), model__components=components)
            for component in FAMILIES["sdxl"].components:
                assert remote.weight_choice(component.name) == copied.weight_choice(component.name)
        # Of shards, every one; and what is read is what the variant holds: half of the plain values.
        fetched = fetch(open_hub(bench))
        files = [file.path.name for file in fetched.weights("unet").files]
        assert files == [f"diffusion_pytorch_model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    plain, weights = TensorFile(both / UNET), fetched.weights("unet")
    assert weights.index.keys() == plain.entries.keys()
    for name in plain.entries:
        assert torch.equal(weights.read(name), (plain.read(name) / 2).half())


def test_a_folder_without_variants_is_read_as_ever(bench: Workbench) -> None:
    source = open_hub(bench, hub_id=str(bench.models / "sdxl"))
    for component in FAMILIES["sdxl"].components:
        assert source.weight_choice(component.name).reason == ""
    single = open_hub(bench, hub_id=str(bench.models / "sdxl-one.safetensors"))
    assert single.weight_choice("unet") is None


def told(config) -> str:
    """Of a plan, without the memory that it needs."""
    source = open_source(config, hub)
    return describe(make_plan(resolve(config, source), source, processes=1), sizes=True)


@pytest.mark.slow
def test_the_plan_says_what_is_read_and_what_is_fetched(bench: Workbench, both: Path, monkeypatch) -> None:
    keys = {"model__path": ID, "precision__compute": "bf16"}
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        out = told(bench.config(**keys))
        assert "reads the fp16 files, 3.2 MiB (enough for bf16; the plain ones have 6.3 MiB)" in out
        assert "reads the plain files, 0.3 MiB (fp32 is asked for)" in out
        assert "to be downloaded 4.0 MiB, into" in out and served.weights_sent() == []
        assert "reads the plain files, 6.3 MiB (model.variant = 'none')" in told(bench.config(**keys, model__variant="none"))


def test_model_variant(bench: Workbench, both: Path) -> None:
    only_unet = shutil.copytree(both, bench.tmp / "only")
    for path in only_unet.rglob("*.fp16.safetensors"):
        if path.parent.name != "unet":
            path.unlink()
    source = open_hub(bench, hub_id=str(only_unet), precision__compute="fp32", model__variant="fp16")
    assert source.weights("unet").files[0].path.name == "diffusion_pytorch_model.fp16.safetensors"
    assert source.weight_choice("vae").reason == "no fp16 files there"
    with pytest.raises(UserError, match="model.variant = 'fp8': no component of"):
        open_hub(bench, hub_id=str(both), model__variant="fp8")
    with pytest.raises(UserError, match="model.variant = 'fp16': no component of"):
        open_hub(bench, hub_id=str(bench.models / "sdxl-one.safetensors"), model__variant="fp16")


# ------------------------------------------------------------------------------------------------------- without a network


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, hub_id",
    [
        ("sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("flux", "black-forest-labs/FLUX.1-dev"),
        ("flux", "black-forest-labs/FLUX.1-schnell"),
    ],
)
def test_published_models_are_planned_without_a_network(bench: Workbench, family, hub_id, monkeypatch, capsys) -> None:
    import socket

    from huggingface_hub import constants

    def connect(*args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(bench.tmp / "empty"))
    tree = bench.tree(family, model__path=hub_id)
    out = told(configs.parse(tree))
    assert "configs as embedded: nothing was fetched" in out and "HF_HUB_OFFLINE" in out
    assert "weights in all" in out
    assert cli.main(["--config", str(bench.write(tree))]) == 2
    error = capsys.readouterr().err
    assert f"model.path = {hub_id!r}" in error and "could not be had from the hub: HF_HUB_OFFLINE is set" in error
    assert not (bench.tmp / "out").exists() and not (bench.tmp / "empty").exists()


def test_another_model_without_a_network_is_refused(bench: Workbench, monkeypatch) -> None:
    with stand_in.serve({}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match="'nobody/nothing'.*there is no such repository"):
            open_hub(bench, "nobody/nothing")
    with pytest.raises(UserError, match=r"'nobody/nothing'.*could not be had from the hub: .*[Cc]onnect"):
        open_hub(bench, "nobody/nothing")


def test_what_an_interrupted_download_left_is_no_model(bench: Workbench, both: Path, monkeypatch) -> None:
    """Without a network: planned over the configs, refused for want of the weights; whole sets count, others do not."""
    shards = shutil.copytree(both, bench.tmp / "shards")
    stand_in.split(shards / FP16)
    with stand_in.serve({ID: shards}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        open_hub(bench)
        configs_alone = shutil.copytree(bench.tmp / "home", bench.tmp / "configs alone", symlinks=True)
        fetched = fetch(open_hub(bench))
        plain_too = fetch(open_hub(bench, model__variant="none"))
    assert fetched.root == plain_too.root
    (fetched.root / FP16).with_name("diffusion_pytorch_model.fp16-00002-of-00002.safetensors").unlink()
    alone = open_hub(bench)
    assert alone.fetched and alone.weights("unet").files[0].path == alone.root / UNET
    (fetched.root / UNET).unlink()
    for home in (bench.tmp / "home", configs_alone):
        served.use(monkeypatch, home)
        alone = open_hub(bench)
        assert not alone.fetched and alone.weight_choice("unet") is None
        with pytest.raises(UserError, match=r"could not be had from the hub: .*[Cc]onnect"):
            fetch(alone)


OTHERS = {
    "someone/one-file": ({"model.safetensors": ""}, "it holds model.safetensors; download one, and give the file's path"),
    "someone/llm": (
        {"config.json": {"architectures": ["LlamaForCausalLM"]}, "model-00001-of-00002.safetensors": ""},
        "it holds LlamaForCausalLM; give an SDXL model, a Flux model, FLUX",
    ),
    "someone/lora": ({"pytorch_lora_weights.safetensors": ""}, "it holds an adapter; .*set adapter.init_from"),
    "someone/peft": (
        {"adapter_config.json": {"r": 4}, "adapter_model.safetensors": ""}, "it holds an adapter; .*set adapter.init_from",
    ),
    "someone/vae": (
        {"config.json": {"_class_name": "AutoencoderKL"}, "diffusion_pytorch_model.safetensors": ""},
        "it holds one part of a model, AutoencoderKL; give its folder in model.components",
    ),
    "someone/texts": ({"README.md": ""}, "it lacks model_index.json; give a whole diffusers folder"),
}  # fmt: skip


def test_a_repository_of_another_kind_is_named_for_what_it_is(bench: Workbench, monkeypatch) -> None:
    """By what the hub lists, and its config.json; no weight is asked for. Of one behind a licence, by the names alone."""
    for hub_id, (files, _) in OTHERS.items():
        (bench.tmp / hub_id).mkdir(parents=True)
        for name, held in files.items():
            (bench.tmp / hub_id / name).write_text(json.dumps(held))
    with stand_in.serve({hub_id: bench.tmp / hub_id for hub_id in OTHERS}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        for hub_id, (_, said) in OTHERS.items():
            with pytest.raises(UserError, match=f"{hub_id}': this repository is not in diffusers' layout .*; {said}"):
                open_hub(bench, hub_id)
        assert {name for _, name, _ in served.asked} == {"config.json"}
        served.gated = "open-sesame"
        served.use(monkeypatch, bench.tmp / "another")
        with pytest.raises(UserError, match="it holds model-00001-of-00002.safetensors"):
            open_hub(bench, "someone/llm")


def test_a_gated_model_is_planned_and_not_trained(bench: Workbench, both: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    published = "stabilityai/stable-diffusion-xl-base-1.0"
    with stand_in.serve({published: both, ID: both}, gated="open-sesame") as served:
        served.use(monkeypatch, bench.tmp / "home")
        source = open_hub(bench, published)
        assert "behind a licence" in source.embedded and source.config("unet")["block_out_channels"] == [320, 640, 1280]
        with pytest.raises(UserError, match="behind a licence.*HF_TOKEN[^\n]*$"):
            fetch(source)
        with pytest.raises(UserError, match="behind a licence.*HF_TOKEN"):
            open_hub(bench)
        assert partials(bench.tmp / "home") == dict.fromkeys(partials(bench.tmp / "home"), 0)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        monkeypatch.setenv("HF_TOKEN", "open-sesame")
        assert fetch(open_hub(bench)).fetched


def test_a_repository_of_pickles_is_refused(bench: Workbench, monkeypatch) -> None:
    pickles = shutil.copytree(bench.models / "sdxl", bench.tmp / "pickles")
    (pickles / UNET).rename((pickles / UNET).with_suffix(".bin"))
    with stand_in.serve({ID: pickles}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match=r"'unet' .* has no weights: .*diffusion_pytorch_model.bin there is a pickle"):
            open_hub(bench)
        assert not any(path.endswith((".bin", ".safetensors")) for _, path, _ in served.asked)


# --------------------------------------------------------------------------------------------------------- what breaks off


def test_a_connection_that_breaks_off_is_taken_up_again(bench: Workbench, both: Path, monkeypatch) -> None:
    with stand_in.serve({ID: both}, drop_after=10 * stand_in.PIECE_BYTES) as served:
        served.use(monkeypatch, bench.tmp / "home")
        source = fetch(open_hub(bench))
        starts = [start for method, path, start in served.asked if (method, path) == ("GET", FP16)]
        assert len(starts) > 10 and starts == sorted(set(starts)), "every byte is asked for once"
        assert (source.root / FP16).read_bytes() == (both / FP16).read_bytes()


def test_a_server_without_ranges(bench: Workbench, both: Path, monkeypatch) -> None:
    """Every try starts the file over: that ends, too, and what was kept does no harm."""
    with stand_in.serve({ID: both}, drop_after=10 * stand_in.PIECE_BYTES, ranges=False) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match="could not be had"):
            fetch(open_hub(bench))
        served.drop_after = None
        source = fetch(open_hub(bench))
        assert (source.root / FP16).read_bytes() == (both / FP16).read_bytes()


def test_a_connection_that_is_lost_keeps_what_came(bench: Workbench, both: Path, monkeypatch) -> None:
    home = bench.tmp / "home"
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, home)
        source = open_hub(bench)
        monkeypatch.setattr(hub, "AT_ONCE", 1)
        served.drop_after = 2 * stand_in.PIECE_BYTES

        def lost() -> None:
            if any(partials(home).values()):
                served.drop_after = 0

        served.pause = 0.2
        with pytest.raises(UserError, match=r"could not be had.*\n.* of 4.0 MiB are kept, and the next start goes on from"):
            fetch(source, check=lost)
        kept = partials(home)
        assert len(kept) == 1 and all(kept.values())
        assert not list(home.rglob("*.safetensors")), "no file has a name before it is whole"
        served.drop_after, served.pause = None, 0.0
        served.asked.clear()
        fetched = fetch(open_hub(bench))
        assert max(start for _, _, start in served.asked) == max(kept.values())
        for name in CHOSEN:
            assert (fetched.root / name).read_bytes() == (both / name).read_bytes()


def test_a_signal_ends_a_download_that_hangs(bench: Workbench, both: Path, monkeypatch) -> None:
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        source = open_hub(bench)
        served.pause = 60.0
        asked = []

        def check() -> None:
            """The signal comes while what follows the first bytes hangs for a minute."""
            if any(partials(bench.tmp / "home").values()):
                asked.append(None)
            if len(asked) == 2:
                raise Interrupted(signal.SIGTERM)

        with pytest.raises(Interrupted):
            fetch(source, check=check)
        assert not list((bench.tmp / "home").rglob("*.safetensors")), "the download went on to the end of a file"


def test_other_bytes_than_the_hub_lists_are_refused(bench: Workbench, both: Path, monkeypatch) -> None:
    with stand_in.serve({ID: both}, flip=True) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match="has another hash than the hub lists"):
            fetch(open_hub(bench))
        served.flip = False
        assert fetch(open_hub(bench)).weights("unet").files


@pytest.mark.parametrize("content", [b"", b"<html>Sign in</html>", None], ids=["empty", "page", "gone"])
def test_a_damaged_file_of_the_cache_is_fetched_again(bench: Workbench, both: Path, monkeypatch, content) -> None:
    """It alone: of the hub's cache, whatever damaged it."""
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        name = fetch(open_hub(bench)).repository.snapshot / FP16
        blob, whole = name.resolve(), name.read_bytes()
        blob.unlink() if content is None else blob.write_bytes(content)
        served.asked.clear()
        source = open_hub(bench)
        assert source.repository.to_fetch([FP16]) == len(whole)
        assert fetch(source).weights("unet").files and name.read_bytes() == whole
        assert served.weights_sent() == [FP16]


def test_a_download_ends_at_the_listed_size_whatever_is_sent(bench: Workbench, both: Path, monkeypatch) -> None:
    beyond, append = [], hub._Blob._append

    def appended(blob, out, piece: bytes) -> None:
        append(blob, out, piece)
        beyond.append(os.fstat(out.fileno()).st_size - blob.file.bytes)

    monkeypatch.setattr(hub._Blob, "_append", appended)
    with stand_in.serve({ID: both}, more=10**6) as served:
        served.use(monkeypatch, bench.tmp / "home")
        assert fetch(open_hub(bench)).weights("unet").files
    assert max(beyond) == 0


@pytest.mark.parametrize("odd", ["../../../../odd", "a" * 39, "A" * 40, "", None])
def test_what_is_no_hash_and_no_commit_names_no_file(bench: Workbench, both: Path, monkeypatch, odd: str | None) -> None:
    for of_commit in (True, False):
        with stand_in.serve({ID: both}) as served:
            served.use(monkeypatch, bench.tmp / "home")
            if of_commit:
                served.commit = lambda hub_id: odd
            elif odd:
                served.listings[ID][UNET]["sha256"] = odd
            else:
                continue
            with pytest.raises(UserError, match=f"it lists {odd!r} as a commit or hash, which is none"):
                open_hub(bench)
    assert not (bench.tmp / "home").exists()


@pytest.mark.parametrize("page", [b"<html>Welcome to our network</html>", b"[]", b'{"siblings": [7]}', b"{}"])
def test_a_page_in_place_of_a_listing_is_no_hub(bench: Workbench, both: Path, monkeypatch, page: bytes) -> None:
    with stand_in.serve({ID: both}, page=page) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match="could not be had from the hub: what answers is no hub"):
            open_hub(bench)


def test_too_little_room_is_told_before_the_download(bench: Workbench, both: Path, monkeypatch, capsys) -> None:
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        open_hub(bench)
        free = shutil.disk_usage(bench.tmp)._replace(free=3 * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
        assert cli.main(["--config", str(bench.write(bench.tree(model__path=ID, precision__compute="bf16")))]) == 6
        error = capsys.readouterr().err
        assert f"downloading {ID} takes 4.0 MiB, and only 3.0 MiB are free" in error
        assert served.weights_sent() == []


def command(bench: Workbench, served, home: Path, **how) -> subprocess.Popen:
    tree = bench.tree(model__path=ID, precision__compute="bf16")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", str(bench.write(tree)), "--resume_from", "auto"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | served.environment(home), **how,
    )  # fmt: skip


def test_a_folder_that_is_missing_beside_others_is_not_asked_of_the_hub(bench: Workbench, both: Path, monkeypatch) -> None:
    (bench.tmp / "models" / "sdxl-base").mkdir(parents=True)
    monkeypatch.chdir(bench.tmp)
    with stand_in.serve({ID: both}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        with pytest.raises(UserError, match="'models/sdxl' does not exist; the folder 'models' holds sdxl-base"):
            open_hub(bench, "models/sdxl")
        assert not served.asked


@pytest.mark.parametrize("path", ["models/tiny flux", "models/Bär", "models/a--b"])
def test_what_can_be_no_name_on_the_hub_is_refused(bench: Workbench, path: str) -> None:
    with pytest.raises(UserError, match=f"model.path = '{path}' is no local file or folder"):
        open_hub(bench, path)


@pytest.mark.slow
def test_a_disk_that_fills_up_and_a_signal_at_the_true_command_line(bench: Workbench, both: Path, monkeypatch) -> None:
    """Status 6, then status 143, each with what came so far kept; the third start fetches the rest."""
    resource = pytest.importorskip("resource")  # not on Windows
    home, limit = bench.tmp / "home", 2**20
    with stand_in.serve({ID: both}) as served:
        # A limit to a file's size stops a write as a full disk does (EFBIG for ENOSPC), and needs no disk of its own.
        process = command(bench, served, home, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        _, error = process.communicate(timeout=120)
        assert process.returncode == 6, error
        assert f"while downloading {ID}" in error and "are kept, and the next start goes on" in error
        assert "Traceback" not in error and ".incomplete" in error
        assert limit in partials(home).values()
        assert not (bench.tmp / "out" / "checkpoints").exists()

        served.asked.clear()
        served.pause = 0.2
        process = command(bench, served, home)
        while max(partials(home).values(), default=0) < limit + 2 * stand_in.PIECE_BYTES:
            time.sleep(0.02)
            assert process.poll() is None, process.communicate()
        served.pause = 600.0  # what is under way will not come
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=120)
        assert process.returncode == 143 and "\nstopped by SIGTERM" in error and "Traceback" not in error
        assert max(start for _, path, start in served.asked if path == FP16) == limit, "goes on where the disk was full"

        served.pause = 0.0
        served.use(monkeypatch, home)
        source = fetch(open_hub(bench))
        for name in CHOSEN:
            assert (source.root / name).read_bytes() == (both / name).read_bytes()
    assert partials(home) == {}

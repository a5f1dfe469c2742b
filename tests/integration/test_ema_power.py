"""Averages of any length, made after the training of those that were set aside: against all steps' weights in fp64."""

from __future__ import annotations

import math
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ema_errors
from scripts import adapter
from tests.harness import ROOT, Workbench, built, metrics_of, take_step
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.base.types import StoredWeight
from trainer.checkpoint import store
from trainer.cli import main as cli
from trainer.ema import power_function, snapshots
from trainer.ema.power import LONGEST, SHORTEST, Profile, fit, gamma_of
from trainer.kernels import dora_torch
from trainer.run import run as runs

POWER: dict[str, Any] = {"ema__kind": "power", "ema__snapshot_every_steps": 4}
# Where there is a checkpoint at each step, the weights after each can be read.
EVERY: dict[str, Any] = {"checkpoint__every_steps": 1, "checkpoint__keep_last": 99}
STEPS = 12


def tree(bench: Workbench, out: str, **more: Any) -> dict[str, Any]:
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": STEPS, "optimizer__lr": 1e-2, "adapter__type": "dora",
            "adapter__targets": ["*attn1.to_q", "conv_in"], "data__batch_size": 1,
        } | POWER | more
    )  # fmt: skip


def train(bench: Workbench, out: str, resume_from: str | None = None, **more: Any) -> Path:
    runs.train(configs.parse(tree(bench, out, **more)), resume_from=resume_from)
    return bench.tmp / out


def not_finite(losses, *given) -> torch.Tensor:
    return losses(*given) * torch.nan


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "ema").iterdir())


@given(st.floats(SHORTEST, LONGEST))
def test_gamma_has_the_length(length: float) -> None:
    """Against the standard deviation of t^gamma on [0, 1] by its moments, (gamma + 1) / (gamma + 1 + n)."""
    gamma = gamma_of(length)
    first, second = ((gamma + 1) / (gamma + 1 + n) for n in (1, 2))
    assert gamma > -1e-6 and math.sqrt(second - first**2) == pytest.approx(length, rel=1e-6)


@pytest.mark.parametrize("length", [0.05, 0.10, 0.25])
def test_the_recursion_gives_the_profile(length: float) -> None:
    """Unrolled in fp64: what each update's weights have in the average."""
    share, weights = power_function(length), torch.zeros(50, dtype=torch.float64)
    for n in range(1, 51):
        weights *= 1 - share(n)
        weights[n - 1] += share(n)
    assert torch.allclose(weights, Profile(length, 50).weights(1, 50), rtol=1e-9, atol=1e-15)
    assert Profile(length, 50).weights(40, 60)[11:].eq(0).all()


def test_the_known_lengths() -> None:
    """gamma of sigma_rel 0.05 and 0.10 as the paper prints them: 16.97 and 6.94."""
    assert [round(gamma_of(length), 2) for length in (0.05, 0.10)] == [16.97, 6.94]
    for length in (0.0, -0.1, 0.3, math.nan, 1e-200, 0.0009):
        with pytest.raises(UserError, match="no power-function average is made of the length"):
            gamma_of(length)


@pytest.mark.parametrize("wanted", [0.02, 0.05, 0.07, 0.10, 0.15, 0.25])
def test_the_fit_is_the_least_squares_solution_and_its_bound_holds(wanted: float) -> None:
    """Against normal equations with a Lagrange multiplier, solved densely; and on random walks, which it bounds."""
    stored = [Profile(length, t) for t in (10, 20, 30, 40) for length in (0.10, 0.05)]
    found, right = fit(stored, Profile(wanted, 40)), Profile(wanted, 40).weights(1, 40)
    columns = torch.stack([profile.weights(1, 40) for profile in stored], 1)
    gram, ones = columns.t() @ columns, torch.ones(len(stored), 1, dtype=torch.float64)
    system = torch.cat([torch.cat([gram, ones], 1), torch.cat([ones.t(), torch.zeros(1, 1)], 1)])
    solved = torch.linalg.solve(system, torch.cat([columns.t() @ right, torch.ones(1, dtype=torch.float64)]))
    shares = torch.tensor(found.shares, dtype=torch.float64)
    assert torch.allclose(columns @ shares, columns @ solved[:-1], atol=1e-7) and shares.sum() == pytest.approx(1)
    off = right - columns @ shares
    assert found.error == pytest.approx(float(off.norm() / right.norm()), abs=1e-12)
    for seed in range(20):
        walk = torch.randn(40, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumsum(0)
        assert ((off @ walk).abs() <= found.reach * (walk.amax(0) - walk.amin(0)) + 1e-12).all()
    worst = (off > 0).double()  # and weights for which it is reached
    assert float((off @ worst).abs()) == pytest.approx(found.reach, rel=1e-6, abs=1e-12)


def test_the_table_of_the_docs_is_what_its_command_prints() -> None:
    told = (ROOT / "docs" / "ema.md").read_text(encoding="utf-8")
    assert ema_errors.table(20, 1000, ema_errors.SHOWN) in told


def test_many_updates_pass_in_pieces(monkeypatch) -> None:
    stored = [Profile(length, t) for t in (10, 20, 30, 40) for length in (0.10, 0.05)]
    whole = fit(stored, Profile(0.15, 40))
    monkeypatch.setattr("trainer.ema.power.ROWS", 7)
    assert fit(stored, Profile(0.15, 40)).shares == pytest.approx(whole.shares, rel=1e-8)


def test_two_of_one_profile_share_what_one_would_have() -> None:
    """As two files between which every update was skipped: the newest two, and two in the middle."""
    stored = [Profile(length, t) for t in (50, 100) for length in (0.10, 0.05)]
    wanted = Profile(0.15, 100)
    alone = fit(stored, wanted)
    for twice in (stored[2:], stored[:2]):
        found = fit([*stored, *twice], wanted)
        assert sum(found.shares) == pytest.approx(1, abs=1e-12)
        assert found.error == pytest.approx(alone.error, rel=1e-9)
        by_profile = dict.fromkeys(stored, 0.0)
        for profile, share in zip([*stored, *twice], found.shares, strict=True):
            by_profile[profile] += share
        assert list(by_profile.values()) == pytest.approx(alone.shares, rel=1e-6)


def test_what_a_skipped_step_sets_aside_twice_counts_once(bench: Workbench, monkeypatch) -> None:
    config = tree(bench, "out", adapter__targets=["conv_in"], ema__snapshot_every_steps=1)
    with built(configs.parse(config)) as run:
        for step, update in zip(range(1, 5), run.updates(), strict=False):
            with monkeypatch.context() as patched:
                if step in (2, 4):
                    patched.setattr(run.step, "losses", partial(not_finite, run.step.losses))
                assert take_step(run, step, update).updated == (step in (1, 3))
            run.progress.step = step
            assert run.artifacts().set_aside() is None
        stored = snapshots.read(bench.tmp / "out" / "ema", 4)
        assert [(each.profile.length, each.profile.updates) for each in stored] == [
            (length, updates) for updates in (1, 2) for length in (0.05, 0.10)
        ]
        found = fit([each.profile for each in stored], Profile(0.10, 2))
        made = snapshots.combined(stored, found.shares)
        for name, average in run.state.averages.of("0.100").items():
            assert torch.allclose(made[name], average.double(), rtol=1e-6, atol=1e-9), name


def test_the_norm_of_a_row_that_cancels_is_that_of_the_training() -> None:
    """s B A = -W in a row, of whole numbers: nothing is left, and the floor of 2^-24 ||W||^2 holds it in both."""
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(shape, generator=generator) for shape in ((6, 36), (2, 36), (6, 2)))
    w[0] = a[1] = 1.0
    b[0] = torch.tensor([0.0, -2.0])
    w_sq, s = w.square().sum(1), 0.5
    (trained,) = dora_torch.adapted_norms([StoredWeight(w, (6, 36))], [w_sq], [a], [b], [s])
    found = snapshots.adapted_norm(w_sq.sqrt(), w @ a.t(), a, b, s)
    assert trained[0] == found[0] == 2.0**-12 * 6
    assert torch.allclose(found.float(), trained, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_an_average_made_afterwards_is_that_of_all_steps(bench: Workbench) -> None:
    out = train(bench, "out", **EVERY)
    weights = [
        TensorFile(out / "checkpoints" / f"step-{n:08d}" / "adapter.safetensors").read_all() for n in range(1, STEPS + 1)
    ]
    assert names(out) == [f"step-{n:08d}.safetensors" for n in (4, 8, 12)]
    for upto, length in ((12, 0.05), (12, 0.10), (12, 0.07), (12, 0.15), (8, 0.10), (8, 0.12)):
        stored = snapshots.read(out / "ema", upto)
        wanted = Profile(length, upto)
        found = fit([each.profile for each in stored], wanted)
        made = snapshots.combined(stored, found.shares)
        shares = wanted.weights(1, upto)
        for name in weights[0]:
            course = torch.stack([each[name].double() for each in weights[:upto]])
            brute = (shares.view(-1, *[1] * (course.dim() - 1)) * course).sum(0)
            bound = found.reach * (course.amax(0) - course.amin(0)) + found.rounding * course.abs().amax(0)
            assert ((made[name] - brute).abs() <= bound).all(), (name, length)
            if length in (0.05, 0.10):
                assert found.reach < 1e-12


@pytest.mark.slow
def test_no_gap_and_no_copy_after_stops_kills_and_ways_back(bench: Workbench) -> None:
    whole = train(bench, "whole", checkpoint__every_steps=3, checkpoint__keep_last=9)
    parts = train(bench, "parts", run__stop_after=6, checkpoint__every_steps=3, checkpoint__keep_last=9)
    # A kill after step 4 and before its checkpoint: what it set aside is of a step that is made again.
    (parts / "ema" / "step-00000008.safetensors").write_bytes(b"of an abandoned course")
    train(bench, "parts", "auto", run__stop_after=7)
    assert names(parts) == ["step-00000004.safetensors"]
    train(bench, "parts", "auto", ema__snapshot_every_steps=2)  # more of them change no byte of the rest
    last = [f"checkpoints/step-00000012/{piece}.safetensors" for piece in ("adapter", "ema", "optimizer")]
    for name in [*last, *(f"ema/{name}" for name in names(whole))]:
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    assert names(whole) == [f"step-{n:08d}.safetensors" for n in (4, 8, 12)]
    assert names(parts) == [f"step-{n:08d}.safetensors" for n in (4, 8, 10, 12)]
    # A kill between the step and the file: the next start makes it.
    (whole / "ema" / "step-00000012.safetensors").unlink()
    train(bench, "whole", "auto")
    assert names(whole) == [f"step-{n:08d}.safetensors" for n in (4, 8, 12)]
    # Back to step 6: what came after it is set aside.
    train(bench, "parts", str(parts / "checkpoints" / "step-00000006"), run__stop_after=7)
    assert names(parts) == ["step-00000004.safetensors"]
    aside = parts / "superseded-after-step-00000006" / "ema"
    assert sorted(path.name for path in aside.iterdir()) == [f"step-{n:08d}.safetensors" for n in (8, 10, 12)]
    assert all(snapshots.problem(path) is None for path in aside.iterdir())


SMALL: dict[str, Any] = {"adapter__targets": ["conv_in"], "run__max_steps": 4, "ema__snapshot_every_steps": 2}


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory) -> Path:
    """The folder of a run that met with nothing."""
    return train(Workbench(models, tmp_path_factory.mktemp("whole")), "whole", **SMALL)


@pytest.mark.parametrize(
    ("place", "error", "step"),
    [
        ("trainer.artifacts.exports.products", torch.OutOfMemoryError("CUDA out of memory."), 2),
        pytest.param("trainer.ema.snapshots.write_tensors", MemoryError("of the host"), 4, marks=pytest.mark.slow),
        pytest.param("trainer.ema.snapshots.problem", RuntimeError("can't allocate memory"), 2, marks=pytest.mark.slow),
    ],
    ids=["W A^T", "the file, at the end", "reading it back"],
)
def test_out_of_memory_where_averages_are_set_aside_loses_nothing(
    bench: Workbench, whole: Path, monkeypatch, capsys, place: str, error: Exception, step: int
) -> None:
    """In mid-run and at its end: the step is saved, the message has the remedy, the next start ends in the same bytes."""
    config, real = bench.write(tree(bench, "out", **SMALL)), pkgutil.resolve_name(place)

    def grow(*given):
        if len(metrics_of(bench.tmp / "out")) == step:
            raise error
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, grow)
        assert cli.main(["--config", str(config), "--resume_from", "auto"]) == 5
    said = capsys.readouterr().err.replace("\n       ", "\n")
    assert f"step {step}: out of memory while averages were set aside\n{error}\ngo on with --resume_from auto" in said
    assert "ema.snapshot_every_steps = 0" in said and "Traceback" not in said
    assert store.steps(bench.tmp / "out" / "checkpoints") == [step]
    assert cli.main(["--config", str(config), "--resume_from", "auto"]) == 0
    last = [f"checkpoints/step-00000004/{piece}.safetensors" for piece in ("adapter", "ema", "optimizer")]
    assert names(bench.tmp / "out") == names(whole)
    for name in [*last, *(f"ema/{name}" for name in names(whole))]:
        assert (bench.tmp / "out" / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_file_that_is_damaged_is_seen_and_written_again(bench: Workbench) -> None:
    with built(configs.parse(tree(bench, "out", adapter__targets=["conv_in"]))) as run:
        for step, update in zip(range(1, 3), run.updates(), strict=False):
            take_step(run, step, update)
        run.progress.step = 2
        artifacts = run.artifacts()
        assert artifacts.set_aside() is None
        path = bench.tmp / "out" / "ema" / "step-00000002.safetensors"
        good, made = path.read_bytes(), path.stat().st_mtime_ns
        assert artifacts.set_aside() is None and path.stat().st_mtime_ns == made, "one that is whole stays"
        for place in (20, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            assert snapshots.problem(path) is not None, place
        with pytest.raises(UserError, match="step-00000002.safetensors is damaged"):
            snapshots.read(path.parent, 2)
        assert artifacts.set_aside() is None and path.read_bytes() == good
        # The norm of a DoRA's combination follows from W A^T, which the file has.
        ((_, layer),) = run.adapter.layers.items()
        held = TensorFile(path).read_all()
        a, b, wa = (held[f"0.100|unet.conv_in.{x}"] for x in ("lora_A.weight", "lora_B.weight", "wa"))
        base = layer.get_base_layer().dequantize(torch.float32).double().flatten(1)
        s = layer.scaling["default"]
        dense = (base + s * b.double().flatten(1) @ a.double().flatten(1)).norm(dim=1)
        found = snapshots.adapted_norm(base.norm(dim=1).float(), wa, a.flatten(1), b.flatten(1), s)
        assert torch.allclose(found, dense, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_tool_writes_the_files_of_the_run(bench: Workbench, kind: str, capsys) -> None:
    """Of the length that the run exports itself: the same weights, and of a DoRA the same scales."""
    out = train(bench, "out", adapter__type=kind)
    assert adapter.main(["ema", str(out), "--length", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "an average over 12 updates up to step 12, made of 6 that were set aside" in said
    assert "no weight is off by more than 0.000% of what it ranged over" in said
    stem = "bear-00000012_ema_0p1"
    for ending in ("", "_comfyui"):
        made, own = (TensorFile(out / "adapters" / f"{name}{ending}.safetensors") for name in (stem, "bear_ema"))
        assert made.entries.keys() == own.entries.keys()
        for name in own.entries:
            one, other = made.read(name), own.read(name)
            if ending and name.endswith("dora_scale"):
                assert torch.allclose(one, other, rtol=2e-6, atol=0), name
            else:
                assert torch.equal(one, other), name
        differ = {key for key in own.metadata if made.metadata.get(key) != own.metadata[key]}
        assert differ <= {"average", "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"}
        assert "length 0.1, of 6 averages" in made.metadata["average"]
    assert adapter.main(["ema", str(out), "--length", "0.12", "--step", "8", "--folder", str(bench.tmp / "else")]) == 0
    header = TensorFile(bench.tmp / "else" / "bear-00000008_ema_0p12.safetensors").metadata
    assert header["ss_steps"] == "8" and "of 4 averages" in header["average"]
    # Lengths that are close have files of their own.
    assert adapter.main(["ema", str(out), "--length", "0.12000001", "--step", "8", "--folder", str(bench.tmp / "else")]) == 0
    assert (bench.tmp / "else" / "bear-00000008_ema_0p12000001.safetensors").exists()
    capsys.readouterr()
    for arguments, reason in (
        (["--length", "0.3"], "no power-function average is made of the length 0.3"),
        (["--length", "0.28"], "--length 0.28: the 6 averages that were set aside give it with an error of "),
        (["--length", "0.1", "--step", "5"], "--step 5: nothing was set aside then; use one of 4, 8, 12"),
    ):
        assert adapter.main(["ema", str(out), *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert adapter.main(["ema", str(bench.tmp), "--length", "0.1"]) == 2
    assert "holds no averages: a run sets them aside with ema.kind = 'power'" in capsys.readouterr().err


def test_power_needs_what_it_is_made_of(bench: Workbench) -> None:
    with pytest.raises(UserError, match="ema.kind = 'power' needs ema.snapshot_every_steps"):
        train(bench, "out", ema__snapshot_every_steps=0)
    with pytest.raises(UserError, match="ema.snapshot_every_steps = 4 has no effect with ema.kind = 'constant'"):
        train(bench, "out", ema__kind="constant")

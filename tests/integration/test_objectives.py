"""Every choice of an objective: told, in several processes, refused where two choices cannot work together."""

from __future__ import annotations

import pytest

from tests.harness import Workbench, metrics_of
from tests.integration import test_processes as processes
from tests.integration.test_errors import refused
from tests.proofs.forks import Server
from trainer.config import Config, parse
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.commands.launch import train as train_one
from workbench.summary.plan import describe

COMMON = {"loss": "huber", "huber_c": 0.2, "t_range": [0.1, 0.95], "stratified": True, "input_perturbation": 0.1}
EVERYTHING = {
    "sdxl": COMMON | {
        "weighting": "soft_min_snr", "min_snr_gamma": 5.0, "timesteps": "logit_normal", "logit_mean": 0.4,
        "multires_noise_iterations": 4, "multires_noise_discount": 0.4,
    },
    "flux": COMMON | {"huber_schedule": "exponential", "timesteps": "mode", "mode_scale": 0.8, "shift": 2.0, "guidance": 1.5},
}  # fmt: skip


def described(config: Config) -> list[str]:
    """The lines that say what a run will do."""
    source = open_source(config)
    return describe(make_plan(resolve(config, source), source, processes=1), sizes=False).splitlines()


SAID = {
    "sdxl": "objective epsilon-prediction, logit_normal(0.4, 1) timesteps from 0.1 to 0.95, soft min-SNR gamma 5, huber loss "
    "(c 0.2, snr), multi-resolution noise (4 levels, 0.4), input perturbation 0.1, stratified",
    "flux": "objective rectified flow, mode(0.8) timesteps from 0.1 to 0.95, shift 2, huber loss (c 0.2, exponential), input "
    "perturbation 0.1, stratified",
}


@pytest.mark.parametrize("family", EVERYTHING)
def test_every_choice_is_told(bench: Workbench, family: str) -> None:
    """In one line. That such a run resumes to the same bytes is shown in test_resume_pairs.py."""
    assert SAID[family] in described(bench.config(family, objective=EVERYTHING[family]))


@pytest.mark.slow
def test_strata_are_those_of_the_global_batch(bench: Workbench) -> None:
    """However it is cut into micro-batches: other times would give other losses by far more than a sum's rounding."""

    def loss(out: str, batch_size: int, **more) -> float:
        cut = {"data__bucket_step": 64, "data__batch_size": batch_size, "step__accumulation": 4 // batch_size}
        more = {"adapter__dropout": 0.0, "run__max_steps": 1, "objective": EVERYTHING["sdxl"] | more}
        train_one(parse(processes.tree(bench, out, processes=1, **cut, **more)), resume_from=None)
        return metrics_of(bench.tmp / out)[0]["loss"]

    one = loss("one", 4)
    assert loss("cut", 1) == pytest.approx(one, rel=processes.LOSS_TOLERANCE)
    assert abs(loss("free", 1, stratified=False) / one - 1) > 1e-3


@pytest.mark.proof
def test_two_processes_draw_what_one_does(server: Server, bench: Workbench) -> None:
    more = {"objective": EVERYTHING["sdxl"], "adapter__dropout": 0.0}
    train_one(parse(processes.tree(bench, "one", processes=1, **more)), resume_from=None)
    processes.run_both(server, bench, processes.tree(bench, "two", processes=2, **more))
    processes.assert_same_course(bench, "one", "two")


@pytest.mark.slow
def test_choices_that_cannot_work_are_refused_before_a_weight_is_read(bench: Workbench, capsys, monkeypatch) -> None:
    def read(self, name):
        raise AssertionError(f"{name} of {self.path} was read")

    monkeypatch.setattr("trainer.base.tensorfile.TensorFile.read", read)
    for family, choices, *said in (
        ("flux", {"min_snr_gamma": 5.0}, "objective.min_snr_gamma = 5.0 has no effect on flux"),
        ("flux", {"weighting": "debiased"}, "objective.weighting = 'debiased' has no effect on flux", "noise schedule"),
        ("flux", {"noise_offset": 0.05}, "objective.noise_offset = 0.05 has no effect on flux"),
        ("sdxl", {"timesteps": "cosmap"}, "objective.timesteps = 'cosmap' is not for sdxl; use 'uniform', 'logit_normal', "),
        ("sdxl", {"noise_offset": 0.05, "multires_noise_iterations": 6}, "both add low frequencies to the noise; set one of"),
        ("sdxl", {"t_range": [0.5, 0.5]}, "objective.t_range = [0.5, 0.5]: it leaves no timestep; give [low, high]"),
        ("sdxl", {"t_range": [0.5, 1.5]}, "objective.t_range", "less than or equal to 1"),
        ("sdxl", {"t_range": [0.2001, 0.2009]}, "objective.t_range = [0.2001, 0.2009] leaves no timestep: none of the 1000"),
        ("flux", {"t_range": [0.0, 0.001]}, "objective.t_range = [0.0, 0.001] leaves no timestep: of a million that logit"),
        ("flux", {"logit_mean": 40.0}, "objective.logit_mean = 40: ", "bring objective.logit_mean nearer to 0"),
        ("sdxl", {"timesteps": "power", "power": 1e-3}, "objective.power = 0.001: ", "bring objective.power nearer to 1"),
    ):  # fmt: skip
        refused(bench, capsys, *said, tree=bench.tree(family, objective=choices))
    refused(
        bench, capsys, "model.prediction = 'epsilon' is undefined at zero terminal SNR",
        tree=bench.tree(model__prediction="epsilon", model__zero_terminal_snr=True),
    )  # fmt: skip


def test_choices_that_work_against_each_other_are_warned_of(bench: Workbench, capsys) -> None:
    config = bench.config(
        model__prediction="v", model__zero_terminal_snr=True, objective={"weighting": "p2", "noise_offset": 0.05}
    )
    lines = described(config)
    warned = [line for line in lines if line.startswith("warning: objective.")]
    assert len(warned) == 2 and "what zero terminal SNR is for is not trained" in warned[0]
    assert (
        "objective v-prediction, uniform timesteps, zero terminal SNR, P2 weights (gamma 1, k 1), noise offset 0.05" in lines
    )

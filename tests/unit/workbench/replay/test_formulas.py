"""The formulas that a run is held against: they agree with what a step does, and name what is planted in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.objectives.test_diffusion import diffusion
from trainer import ema, optim
from trainer.adapters.targets import Target
from trainer.base.types import Batch, Conditioning, Occurrence, each_tensor
from trainer.engine.step import Inputs, Losses, StepResult
from trainer.objectives import Diffusion, Flow, Loss, Noise, Objective, Weighting, base
from workbench.replay import formulas
from workbench.replay.formulas import Snapshot, Update, Updates
from workbench.replay.rounding import rounded_to

LOSSES = [Loss(), *(Loss(kind, 0.2, by) for kind in ("huber", "smooth_l1") for by in ("constant", "exponential", "snr"))]
WEIGHTS = [
    Weighting(),
    *(Weighting(name) for name in ("min_snr", "soft_min_snr", "debiased", "p2")),
    Weighting(min_snr_gamma=2.0),
]
OBJECTIVES = [
    *(Flow(loss=loss, noise=Noise(input_perturbation=0.1)) for loss in LOSSES),
    *(diffusion(kind, weighting=weight, loss=loss) for (kind, weight), loss in zip(
        itertools.product(("epsilon", "v"), WEIGHTS), itertools.cycle(LOSSES))),
]  # fmt: skip


def losses_of(objective: Objective) -> tuple[Losses, Inputs]:
    """Of four samples with masks, and a model that halves what it sees."""
    of = tuple(Occurrence(0, f"0/{i}.jpg", i) for i in range(4))
    draw, size = torch.Generator().manual_seed(1), torch.tensor([[64, 64]] * 4)
    latents, masks = torch.randn(4, 2, 4, 4, generator=draw), torch.rand(4, 4, 4, generator=draw)
    batch = Batch(of, latents, ("",) * 4, Conditioning(torch.zeros(4, 1, 1)), size, size, size, loss_weights=masks)
    made = Losses(
        objective=objective, predict=lambda noised, time, conditioning, batch: noised / 2, tokens=lambda captions: {},
        encode=lambda tokens: Conditioning(torch.zeros(1)), image_tokens=lambda h, w: 16, seed=3, device=torch.device("cpu"),
    )  # fmt: skip
    return made, made.inputs(batch, of)


def in_fp64(inputs: Inputs) -> Inputs:
    return each_tensor(inputs, lambda each: each.double() if each.is_floating_point() else each)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.describe())
def test_the_loss_of_every_objective_agrees(objective: Objective) -> None:
    made, inputs = losses_of(objective)
    exact = formulas.sample_losses(made, in_fp64(inputs))
    assert exact.dtype == torch.float64 and formulas.sample_losses(made, inputs).dtype == torch.float32
    torch.testing.assert_close(made.of(inputs).double(), exact, rtol=3e-6, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.describe())
def test_what_a_run_has_in_fp32_makes_no_bound_wider(objective: Objective) -> None:
    """Of a model that computes in fp32 nothing else errs, however coarse the compute dtype is."""
    made, inputs = losses_of(objective)
    exact = formulas.sample_losses(made, in_fp64(inputs))
    with rounded_to(torch.bfloat16, torch.Generator().manual_seed(0)):
        rounded = formulas.sample_losses(made, inputs)
    torch.testing.assert_close(rounded.double(), exact, rtol=3e-6, atol=0)


IN_LOSS: dict[str, tuple[Objective, Any, str, Callable]] = {
    "the target's sign": (Flow(), Flow, "target", lambda self, latents, noise, at: latents - noise),
    "signal and noise": (Flow(), Flow, "path", lambda self, time: (time, 1 - time)),
    "v taken for epsilon": (diffusion("v"), Diffusion, "target", lambda self, latents, noise, at: noise),
    "a weight for epsilon, of v": (
        diffusion("v", weighting=Weighting("min_snr")), Weighting, "weight",
        lambda self, snr, prediction: (snr.clamp_max(5.0) / snr).float(),
    ),
    "no weight": (
        diffusion("epsilon", weighting=Weighting("debiased")), Diffusion, "weight", lambda self, time: torch.ones(len(time))
    ),
    "the threshold": (
        Flow(loss=Loss("huber", 0.1, "constant")), Loss, "threshold",
        lambda self, progress, ratio: torch.full_like(progress, 0.2).float(),
    ),
    "huber without its factor": (
        Flow(loss=Loss("huber")), Loss, "errors",
        lambda self, guess, target, c: (guess - target) ** 2 / ((guess - target) ** 2 + c.view(-1, 1, 1, 1) ** 2) ** 0.5,
    ),
    "masks left out": (
        Flow(), base, "sample_losses",
        lambda prediction, target, weight, masks, **more: (prediction - target).square().flatten(1).mean(1) * weight,
    ),
    "a mean over the mask alone": (
        Flow(), base, "sample_losses", lambda prediction, target, weight, masks, **more:
        ((prediction - target).square() * masks[:, None]).flatten(1).sum(1) / masks.flatten(1).sum(1) / 2 * weight,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_LOSS)
def test_a_fault_of_the_loss_is_not_shared(what: str, monkeypatch) -> None:
    objective, place, name, wrong = IN_LOSS[what]
    made, inputs = losses_of(objective)
    right = formulas.sample_losses(made, in_fp64(inputs))
    monkeypatch.setattr(place, name, wrong)
    made, inputs = losses_of(objective)
    assert torch.equal(formulas.sample_losses(made, in_fp64(inputs)), right)
    assert float((made.of(inputs) - right).abs().max()) > 0.01


NAMES = (
    "net.a.lora_A.weight",
    "net.a.lora_B.weight",
    "net.b.lora_A.weight",
    "net.b.lora_B.weight",
    "net.b.lora_magnitude_vector",
)


DECAY = 0.3  # of the average: it counts from the third update on, where (1 + n) / (10 + n) is above it


class Run:
    """An adapter of two layers, and its optimizer: b is trained up to step 3, has a decay of its own, and magnitudes."""

    def __init__(self, *, decays: tuple[float, ...] = (0.1, 0.5, 0.0), stop: int = 3, name: str = "adamw") -> None:
        self.draw = torch.Generator().manual_seed(2)
        self.named = {name: nn.Parameter(0.1 * self.randn(300 + 7 * i)) for i, name in enumerate(NAMES)}
        targets = {"net.a": Target("net", "a", 4, 4.0), "net.b": Target("net", "b", 4, 4.0, weight_decay=0.5, stop_step=3)}
        groups = [
            {"params": [self.named[name] for name in NAMES[some]], "weight_decay": decay, "magnitudes": magnitude, **keys}
            for decay, (some, magnitude, keys) in zip(decays, (
                (slice(0, 2), False, {"lr": 1e-2}), (slice(2, 4), False, {"lr": 3e-3, "stop_step": stop}),
                (slice(4, 5), True, {"lr": 1e-2, "stop_step": stop}),
            ), strict=True)
        ]  # fmt: skip
        self.optimizer = optim.build_optimizer(name, groups)
        adapter = SimpleNamespace(
            named_parameters=lambda: self.named,
            targets=targets,
            state_dict=lambda: {n: p.detach() for n, p in self.named.items()},
        )
        average = ema.Average(self.named, DECAY, lambda: None)
        self.state: Any = SimpleNamespace(
            adapter=adapter, optimizer=optim.OptimizerState(self.optimizer, name), average=average
        )

        self.updates = Updates(self.state, name == "adamw", (0.9, 0.999), 1e-8, 0.1, max_grad_norm=1.0, average=DECAY)

    def randn(self, size: int) -> Tensor:
        return torch.randn(size, generator=self.draw)

    def step(self, number: int, *, updated: bool = True) -> Update:
        """As `Step.run` does it: a gradient, clipping, the groups that are trained still, the average."""
        for parameter in self.named.values():
            parameter.grad.copy_(self.randn(parameter.numel()))
        before, gradients = Snapshot.of(self.state), {name: p.grad.clone() for name, p in self.named.items()}
        groups = self.optimizer.param_groups
        flat = [parameter for group in groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in flat])
        rates = tuple(group["lr"] for group in groups)
        if updated:
            torch.nn.utils.clip_grads_with_norm_(flat, 1.0, norm)
            off = [group.get("stop_step", number) < number for group in groups]
            self.optimizer.param_groups = [g | {"params": []} if stop else g for g, stop in zip(groups, off, strict=True)]
            self.optimizer.step()
            self.optimizer.param_groups = groups
            self.state.average.update()
        result = StepResult(1.0, float(norm), rates, updated, 1.0)
        return self.updates.judge(before, Snapshot.of(self.state), gradients, number, result)


def test_right_updates_are_explained_and_what_stopped_stands_still() -> None:
    run = Run()
    judged = [run.step(number, updated=number != 2) for number in range(1, 21)]
    assert all(each.share <= 1 and not each.unjudged for each in judged), judged
    assert {"weight", "first moment", "second moment", "step", "average", "average's count"} == judged[0].worst.keys()
    assert max(each.share for each in judged) > 0.01, "the bounds are not far too wide"


@contextmanager
def patched(patch: pytest.MonkeyPatch, what: str, run: Run) -> Iterator[None]:
    """The run, with a fault in what its step does."""
    right, clip = torch.optim.AdamW.step, torch.nn.utils.clip_grads_with_norm_
    average = run.state.average

    def wrong_step(**keys: Any) -> Callable:
        def step(self, *given):
            then = [{key: group[key] for key in keys} for group in self.param_groups]
            for group in self.param_groups:
                group.update({key: value(group[key]) if callable(value) else value for key, value in keys.items()})
            right(self, *given)
            for group, old in zip(self.param_groups, then, strict=True):
                group.update(old)

        return step

    def coupled(self, *given):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.data, alpha=group["weight_decay"])
        wrong_step(weight_decay=0.0)(self, *given)

    def uncorrected(self, *given):
        right(self, *given)
        for state in self.state.values():
            state["step"].fill_(1000.0)

    def twice(self=average):
        ema.Average.update(self)
        ema.Average.update(self)

    faults: dict[str, Callable[[], None]] = {
        "no clipping": lambda: patch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *given: None),
        "clipping to twice the norm": lambda: patch.setattr(
            torch.nn.utils, "clip_grads_with_norm_", lambda p, most, norm: clip(p, 2 * most, norm)
        ),
        "no decay": lambda: patch.setattr(torch.optim.AdamW, "step", wrong_step(weight_decay=0.0)),
        "decay in the gradient": lambda: patch.setattr(torch.optim.AdamW, "step", coupled),
        "beta2": lambda: patch.setattr(torch.optim.AdamW, "step", wrong_step(betas=(0.9, 0.99))),
        "beta1": lambda: patch.setattr(torch.optim.AdamW, "step", wrong_step(betas=(0.8, 0.999))),
        "eps": lambda: patch.setattr(torch.optim.AdamW, "step", wrong_step(eps=1e-4)),
        "twice the rate": lambda: patch.setattr(torch.optim.AdamW, "step", wrong_step(lr=lambda rate: 2 * rate)),
        "no bias correction": lambda: patch.setattr(torch.optim.AdamW, "step", uncorrected),
        "no average": lambda: patch.setattr(average, "update", lambda: None),
        "an average, counted alone": lambda: patch.setattr(torch, "_foreach_lerp_", lambda *given: None),
        "an average twice": lambda: patch.setattr(average, "update", twice),
        "the decay of the average": lambda: setattr(average, "decay", 0.2),
    }  # fmt: skip
    faults[what]()
    yield


FAULTS = {
    "no clipping": "first moment", "clipping to twice the norm": "first moment", "no decay": "weight",
    "decay in the gradient": "first moment",
    "beta2": "second moment", "beta1": "first moment", "eps": "weight", "twice the rate": "weight",
    "no bias correction": "step", "no average": "average's count",
    "an average, counted alone": "average", "an average twice": "average", "the decay of the average": "average",
}  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "step"), [({"decays": (0.1, 0.5, 0.1)}, 1), ({"decays": (0.1, 0.1, 0.0)}, 1), ({"stop": 9}, 4)],
    ids=["a decay of magnitudes", "one decay for all", "what stopped is trained"],
)  # fmt: skip
def test_groups_that_are_not_the_configs_are_named(planted: dict, step: int) -> None:
    run = Run(**planted)
    judged = [run.step(number) for number in range(1, step + 1)]
    assert all(each.share <= 1 for each in judged[:-1])
    assert judged[-1].worst["weight"][0] > 3 and judged[-1].worst["weight"][1].startswith("net.b.")


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_the_update_is_named(what: str, monkeypatch) -> None:
    run = Run()
    for number in (1, 2):
        assert run.step(number).share <= 1
    with monkeypatch.context() as patch, patched(patch, what, run):
        judged = run.step(3)
    assert judged.worst[FAULTS[what]][0] > 3, judged


def test_another_optimizer_is_not_judged_but_its_average_is() -> None:
    run = Run(name="lion")
    judged = run.step(1)
    assert "AdamW" in judged.unjudged and judged.worst.keys() == {"average", "average's count"} and judged.share <= 1

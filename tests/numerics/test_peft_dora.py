"""`trainer.accelerate_peft_dora`: PEFT's own DoRA layers, computed by our kernels, beside PEFT in fp64 and as it is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import bench_dora
from tests.numerics.test_dora import absolute_sizes, assert_norm_is_exact, norm_of
from tests.numerics.test_step_oracle import GRADIENT_TOLERANCE
from trainer import accelerate_peft_dora
from trainer.base.errors import UserError
from trainer.kernels import dora_torch
from trainer.runtime.peft_dora import OurConv2d, OurLinear

DORA = dict(r=3, lora_alpha=4, use_dora=True, target_modules=["0", "3", "4"])


def moved(model: nn.Module) -> nn.Module:
    """The model, its B and m away from where PEFT begins."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.2 * torch.rand_like(parameter))
    return model


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.GELU(), nn.Flatten(2), nn.Linear(16, 12), nn.Linear(12, 5)
    )


def peft(base: nn.Module | None = None, **more) -> PeftModel:
    return moved(get_peft_model(net() if base is None else base, LoraConfig(**DORA | more)))


def accelerated(model: nn.Module) -> nn.Module:
    """A copy of the model that computes with our kernels."""
    ours = copy.deepcopy(model)
    accelerate_peft_dora(ours)
    return ours


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """[y, dx, and the gradients of A, B and m of each layer]."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


# --- one layer, forward and backward


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 12), n=st.integers(1, 20), k=st.integers(1, 20), rank=st.integers(1, 9),
    alpha=st.sampled_from([0.5, 4.0]), rslora=st.booleans(), bias=st.booleans(), conv=st.booleans(),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.integers(1, 2), padding=st.integers(0, 1),
    dtype=st.sampled_from([torch.float64, torch.float32]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_layer_is_peft_s_formula(m, n, k, rank, alpha, rslora, bias, conv, kernel, stride, padding, dtype, seed) -> None:
    """Output and every gradient beside PEFT's in fp64, within the rounding of the sums; over fp32 PEFT's own lie there, too.

    The bounds are those of test_dora.check, of which two sides have two.
    """
    torch.manual_seed(seed)
    base = nn.Conv2d(k, n, kernel, stride, padding, bias=bias) if conv else nn.Linear(k, n, bias=bias)
    x = torch.randn(2, k, m + 2, 4, dtype=dtype) if conv else torch.randn(2, m, k, dtype=dtype)
    given = LoraConfig(r=rank, lora_alpha=alpha, use_dora=True, use_rslora=rslora, target_modules=["0"])
    theirs = moved(get_peft_model(nn.Sequential(base.to(dtype)), given))
    ours = accelerated(theirs)
    dy = torch.randn(theirs(x).shape, dtype=dtype)
    exact = results(copy.deepcopy(theirs).double(), x.double(), dy.double())
    got, peft_s = results(ours, x, dy), results(theirs, x, dy)

    layer = ours.base_model.model[0]
    assert type(layer) in (OurLinear, OurConv2d)
    fixed, scaling = layer.frozen.base, layer.scaling["default"]
    a, b, magnitude = (p for p in ours.parameters() if p.requires_grad)
    c = norm_of(fixed, a, b, scaling)
    unit = torch.finfo(dtype).eps / 2
    terms = max(*fixed.weight_shape, dy.numel() // n, rank, a[0].numel())
    tolerance = 6 * unit * (terms**0.5 + 4) + 16 * unit * assert_norm_is_exact(fixed, a, b, scaling, c)
    *sizes, of_z_N, of_y_N = absolute_sizes(fixed, [x, a, b, magnitude.flatten()], scaling, dy, c)
    bounds = [*(tolerance * size for size in sizes), (tolerance * of_z_N + unit * of_y_N).norm()]
    for one, other, reference, bound in zip(got, peft_s, exact, bounds, strict=True):
        assert one.dtype == other.dtype == dtype and one.shape == other.shape
        assert float((one.double() - reference).norm()) <= float(bound)
        assert float((one - other).norm()) <= 2 * float(bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_bases_and_autocast_are_as_exact_as_peft(dtype: torch.dtype, autocast: bool) -> None:
    """Relative L2 against PEFT in fp64 of three layers. Each rounds an output, and its gradient, once or twice: eight
    roundoffs."""
    theirs = peft(net().to(torch.float32 if autocast else dtype))
    ours, x = accelerated(theirs), X if autocast else X.to(dtype)
    dy = torch.randn(2, 8, 5)
    exact = results(copy.deepcopy(theirs).double(), x.double(), dy.to(dtype).double())
    with torch.autocast("cpu", dtype, enabled=autocast):
        got, peft_s = results(ours, x, dy), results(theirs, x, dy)
    assert [each.dtype for each in got] == [each.dtype for each in peft_s]
    for one, reference in zip(got, exact, strict=True):
        assert float((one.double() - reference).norm() / reference.norm()) <= 8 * torch.finfo(dtype).eps / 2


def test_norms_are_fp32_under_autocast(monkeypatch) -> None:
    """The norm that divides m under autocast is that without it, bit for bit."""
    ours, norms, original = (
        accelerated(peft(nn.Sequential(nn.Linear(16, 12)), target_modules=["0"])),
        [],
        dora_torch.adapted_norms,
    )

    def seen(*given: torch.Tensor) -> list[torch.Tensor]:
        norms.extend(original(*given))
        return norms[-1:]

    monkeypatch.setattr(dora_torch, "adapted_norms", seen)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours(torch.randn(3, 16))
    assert len(norms) == 2 and torch.equal(*norms)


# --- twenty steps


def train(model: nn.Module, loss, steps: int = 20) -> list[torch.Tensor]:
    step = bench_dora.training(model, loss)
    for _ in range(steps):
        step()
    return [parameter.detach().double() for parameter in model.parameters() if parameter.requires_grad]


def distance(one: list[torch.Tensor], other: list[torch.Tensor], start: list[torch.Tensor]) -> float:
    """How far apart two trainings end, over how far the second came."""
    apart, way = (sum(float((p - q).square().sum()) for p, q in zip(other, each, strict=True)) for each in (one, start))
    return (apart / way) ** 0.5


def assert_trains_alike(theirs: nn.Module, loss) -> None:
    ours = accelerated(theirs)
    start = [parameter.detach().double() for parameter in theirs.parameters() if parameter.requires_grad]
    off = distance(train(ours, loss), train(theirs, loss), start)
    print(f"after 20 steps: {off:.1e} of the way")
    assert off < GRADIENT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_pocket_models_train_as_by_peft(family: str) -> None:
    assert_trains_alike(*bench_dora.pocket(family, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "shape"),
    [(lambda: nn.Linear(1280, 1280), (64, 1280)), (lambda: nn.Linear(3072, 3072), (64, 3072)),
     (lambda: nn.Conv2d(320, 320, 3, padding=1), (1, 320, 8, 8))],
)  # fmt: skip
def test_full_size_layers_train_as_by_peft(base, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(base()), LoraConfig(r=16, lora_alpha=16, use_dora=True, target_modules=["0"]))
    x = torch.randn(shape)
    target = model(x).detach() + torch.randn_like(model(x))
    assert_trains_alike(model, lambda each: (each(x) - target).square().mean())


# --- what PEFT does with its layers


def test_files_and_switches_are_peft_s(tmp_path: Path) -> None:
    theirs = peft()
    ours = accelerated(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(net(), tmp_path)
    torch.testing.assert_close(again(X), ours(X))
    y = ours(X)
    with ours.disable_adapter():
        assert torch.equal(ours(X), net()(X))
    ours.merge_adapter()
    torch.testing.assert_close(ours(X), y)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(X), y)
    for model in (theirs, ours):
        torch.manual_seed(2)
        model.add_adapter("plain", LoraConfig(r=2, target_modules=["3"]))
        model.add_adapter("second", LoraConfig(**DORA | {"target_modules": ["4"]}))
        moved(model)
    for name in ("plain", "second", "default"):
        for model in (theirs, ours):
            model.set_adapter(name)
        torch.testing.assert_close(ours(X), theirs(X))
    ours.base_model.set_adapter(["default", "second"])
    with pytest.raises(UserError, match="several adapters are active"):
        ours(X)


def test_a_base_that_changes_is_seen() -> None:
    """In place, as by load_state_dict; by another tensor, as by double(). A model that was copied computes alike."""
    ours = accelerated(peft())
    before = ours(X)
    assert torch.equal(copy.deepcopy(ours)(X), before)
    state = {name: 2 * value if "base_layer" in name else value for name, value in ours.state_dict().items()}
    ours.load_state_dict(state)
    assert not torch.allclose(ours(X), before)
    torch.testing.assert_close(ours(X), peft_of(ours)(X))
    torch.testing.assert_close(ours.double()(X.double()), peft_of(ours)(X.double()))


def peft_of(ours: nn.Module) -> nn.Module:
    """The same model, computed by PEFT."""
    theirs = copy.deepcopy(ours)
    accelerate_peft_dora(theirs).undo()
    assert not any(isinstance(module, (OurLinear, OurConv2d)) for module in theirs.modules())
    return theirs


def test_checkpointing_and_inference_mode_change_no_bit() -> None:
    ours, dy = accelerated(peft()), torch.randn(2, 8, 5)
    with torch.inference_mode():
        ours(X)
    plain = results(ours, X, dy)
    ours.zero_grad()
    x = X.clone().requires_grad_()
    y = checkpoint(ours, x, use_reentrant=False)
    y.backward(dy)
    again = [y.detach(), x.grad, *(p.grad for p in ours.parameters() if p.requires_grad)]
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_what_is_taken_and_what_is_left_is_named() -> None:
    model = peft(net(), target_modules=["0", "3"])
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["4"]))
    taken = accelerate_peft_dora(model)
    assert list(taken.layers) == ["base_model.model.0", "base_model.model.3"]
    assert taken.left == {"base_model.model.4": "it has no DoRA"}
    assert accelerate_peft_dora(model) == taken
    taken.undo()
    taken.undo()
    assert "Our" not in repr(model)


# --- what is refused


def with_hook(model: PeftModel) -> PeftModel:
    model.base_model.model[3].get_base_layer().register_forward_hook(lambda *_: None)
    return model


def trained(model: PeftModel) -> PeftModel:
    model.base_model.model[3].get_base_layer().bias.requires_grad_()
    return model


def several(model: PeftModel) -> PeftModel:
    model.add_adapter("second", LoraConfig(**DORA | {"target_modules": ["3"]}))
    model.base_model.set_adapter(["default", "second"])
    return model


def eight_bits() -> PeftModel:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(16, 12, has_fp16_weights=False).to("cpu")
    layer(torch.zeros(1, 16))  # makes its scales, which PEFT reads
    model = nn.Sequential(nn.Linear(4, 4), layer)
    model.is_loaded_in_8bit = True
    return get_peft_model(model, LoraConfig(**DORA | {"target_modules": ["0", "1"]}))


def four_bits() -> PeftModel:
    import bitsandbytes

    model = nn.Sequential(nn.Linear(4, 4), bitsandbytes.nn.Linear4bit(16, 12, quant_type="nf4").to("cpu"))
    model.is_loaded_in_4bit = True
    return get_peft_model(model, LoraConfig(**DORA | {"target_modules": ["0", "1"]}))


REFUSED = {
    "embedding": (lambda: peft(nn.Sequential(nn.Embedding(9, 4)), target_modules=["0"]), r"PEFT's Embedding over Embedding"),
    "conv1d": (lambda: peft(nn.Sequential(nn.Conv1d(3, 4, 3)), target_modules=["0"]), r"model\.0: PEFT's Conv1d"),
    "8 bits": (eight_bits, r"model\.1: PEFT's Linear8bitLt over .* in torch.int8"),
    "4 bits": (four_bits, r"model\.1: PEFT's Linear4bit over .* in torch.uint8"),
    "dropout": (lambda: peft(lora_dropout=0.1), r"model\.3: lora_dropout, with which"),
    "several": (lambda: several(peft()), r"1 DoRA .*model\.3: several adapters are active \(default, second\)"),
    "trained": (lambda: trained(peft()), r"1 DoRA .*model\.3: its base is trained"),
    "hooks": (lambda: with_hook(peft()), r"1 DoRA .*model\.3: hooks at its base"),
    "groups": (lambda: peft(nn.Sequential(nn.Conv2d(6, 6, 3, groups=3)), target_modules=["0"]), "groups=3.*only groups 1"),
    "padding": (
        lambda: peft(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")), target_modules=["0"]),
        "circular.*only groups 1",
    ),
    "same": (lambda: peft(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same")), target_modules=["0"]), "same.*in pixels"),
    "no dora": (lambda: peft(use_dora=False), r"no DoRA layer of PEFT; give it an adapter of LoraConfig\(use_dora=True\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_before_anything_is_changed(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=message):
        accelerate_peft_dora(model)
    assert [type(module) for module in model.modules()] == before

"""The cached norm, merging, switching, compiling: what surrounds the arithmetic of an adapted layer."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import DENOISER, PHOTOS, Workbench, built, take_step
from tests.integration.test_export import inputs_for
from tests.numerics.test_step_oracle import GRADIENT_TOLERANCE
from trainer import optim
from trainer.adapters import ADAPTER_NAME, Method, Rates, Target, inject
from trainer.adapters.dora import LARGE_BIAS
from trainer.adapters.kinds import KINDS, file_kind
from trainer.adapters.layers import SharedInput
from trainer.base.errors import UserError
from trainer.kernels import choose, decode, dora_torch
from trainer.kernels import scratch as scratch_module
from trainer.quantization import ALL_FORMATS, FORMATS, Format, FrozenConv2d, FrozenLinear, freeze_layers, storage_of_layers

FORMAT_IDS = [f.name for f in ALL_FORMATS]


def network(format: Format, compute: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A convolution and two linears, quantised; x is [2, 6, 5, 5]."""
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(2), nn.Linear(25, 40), nn.Linear(40, 7, bias=False))
    weights = {name: torch.randn(p.shape, generator=g) / p[0].numel() ** 0.5 for name, p in model.named_parameters()}
    freeze_layers(model, storage_of_layers(format=format, compute=compute, unquantised=torch.float32), dora_torch)
    for name, layer in model.named_children():
        if f"{name}.weight" in weights:
            layer.load_weight(weights[f"{name}.weight"])
            if layer.bias is not None:
                layer.bias.data.copy_(weights[f"{name}.bias"])
    return model


def with_adapter(model: nn.Module, *, dora: bool = True, rank: int = 3, names=("0", "2", "3"), g=None):
    adapter = inject(
        {"net": model},
        [Target("net", name, rank, 2.0) for name in names],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(file_kind(magnitudes=dora)),
        seed=0,
    )
    jitter(adapter)
    return adapter


@torch.no_grad()
def jitter(adapter, seed: int = 1) -> None:
    g = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.named_parameters().items():
        noise = torch.randn(parameter.shape, generator=g)
        if name.endswith("lora_B.weight"):
            parameter.add_(0.1 * noise)
        elif name.endswith("magnitude_vector"):
            parameter.mul_(1 + 0.1 * noise)
    adapter.mark_stale()


@pytest.mark.parametrize("format", ALL_FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("dora", [False, True])
def test_merged_equals_unmerged_over_every_base(format: Format, dora: bool) -> None:
    """Merging stands a dense fp32 copy in for the layer: nothing is requantised, and unmerging gives back the base.

    PEFT's own merge over a quanto layer changes nothing at all, silently.
    """
    model = network(format)
    payloads = {k: t.clone() for k, t in model.state_dict().items()} | {
        k: t.clone() for k, t in model.named_buffers() if "payload" in k
    }
    adapter = with_adapter(model, dora=dora)
    x = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        with adapter.at_strength(0.0):
            base = model(x)
        unmerged = model(x)
        for layer in adapter.layers.values():
            layer.merge(safe_merge=True)
        merged = model(x)
        for layer in adapter.layers.values():
            layer.unmerge()
        again = model(x)
    moved = (merged - base).norm()
    assert moved > 0.05 * base.norm()
    # Both are fp32: some tens of roundings of 2^-24 beside a change of at least a twentieth.
    assert (merged - unmerged).norm() <= 1e-5 * moved
    assert torch.equal(again, unmerged)
    for name, buffer in model.named_buffers():
        if "payload" in name:
            assert torch.equal(_bits(buffer), _bits(payloads[name.replace("base_layer.", "")])), name


def _config(dora: bool) -> LoraConfig:
    return LoraConfig(r=2, use_dora=dora, target_modules=["2"])


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def test_switching_and_disabling_adapters() -> None:
    """Through PEFT's own switches: each adapter computes with its own norm, and disabled is the base."""
    model = network(FORMATS["int8"])
    x = torch.randn(2, 6, 5, 5)
    with torch.no_grad():
        base = model(x)
        adapter = with_adapter(model)
        first = model(x)
        layers = list(adapter.layers.values())
        for layer in layers:
            layer.update_layer("second", 2, 4.0, _config(True))
            layer.lora_A["second"].weight.normal_()
            layer.lora_B["second"].weight.normal_()
            layer.set_adapter("second")
        second = model(x)
        assert not torch.allclose(second, first)
        for layer in layers:
            layer.merge()
        with pytest.warns(UserWarning), pytest.raises(ValueError, match="second is merged already; unmerge it first"):
            layers[0].merge(adapter_names=[ADAPTER_NAME])
        merged = model(x)
        assert (merged - second).norm() <= 1e-5 * (second - base).norm()
        for layer in layers:
            layer.unmerge()
            layer.set_adapter(ADAPTER_NAME)
        assert torch.equal(model(x), first)
        for layer in layers:
            layer.enable_adapters(False)
        assert torch.equal(model(x), base)
        for layer in layers:
            layer.enable_adapters(True)
        assert torch.equal(model(x), first)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_cached_norm_is_fresh_after_every_optimizer(name: str, storage: str, monkeypatch) -> None:
    """Neither optimizer advances the version counter of the parameters; the norm follows all the same.

    Magnitudes have 32-bit state and no weight decay, also in an 8-bit optimizer.
    """
    monkeypatch.setattr(optim.libraries, "MIN_8BIT_SIZE", 1)
    model = network(FORMATS[storage])
    adapter = with_adapter(model, rank=16)
    groups = adapter.parameter_groups(Rates(lr=1e-2, weight_decay=0.1))
    optimizer = optim.build_optimizer(name, groups)
    x = torch.randn(2, 6, 5, 5)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["params"][0].grad.zero_()
        adapter.mark_stale()
    before = {layer: layer.norm.clone() for layer in adapter.layers.values()}
    model(x)
    for layer in adapter.layers.values():
        base = layer.get_base_layer()
        a, b = layer.factors(ADAPTER_NAME)
        dense = base.dequantize(torch.float32).flatten(1).double() + layer.scaling[ADAPTER_NAME] * b.double() @ a.double()
        assert torch.equal(layer.norm, layer.current_norm(ADAPTER_NAME))
        assert torch.allclose(layer.norm.double(), dense.norm(dim=1), rtol=1e-5)
        assert not torch.equal(layer.norm, before[layer])
    (magnitudes,) = [group for group, given in zip(optimizer.param_groups, groups, strict=True) if given["magnitudes"]]
    (others,) = [group for group, given in zip(optimizer.param_groups, groups, strict=True) if not given["magnitudes"]]
    assert magnitudes["weight_decay"] == 0 and others["weight_decay"] == 0.1
    kinds = {t.dtype for t in optimizer.state[magnitudes["params"][0]].values() if torch.is_tensor(t) and t.numel() > 1}
    assert kinds == {torch.float32}
    if name == "adamw8bit":
        assert torch.uint8 in {t.dtype for t in optimizer.state[others["params"][0]].values() if torch.is_tensor(t)}


class CountedKernels:
    """The plain kernels, counting the norms."""

    name = "torch"

    def __init__(self) -> None:
        self.norms: Counter = Counter()

    def __getattr__(self, name):
        return getattr(dora_torch, name)

    def adapted_norms(self, weights, *rest):
        self.norms.update(weight.codes.data_ptr() for weight in weights)
        return dora_torch.adapted_norms(weights, *rest)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_one_norm_a_layer_and_step(bench: Workbench, family: str) -> None:
    """With checkpointing and four micro-batches, whose blocks run eight times a step, each norm is computed once."""
    config = bench.config(
        family, adapter__type="dora", adapter__targets={"sdxl": "attention", "flux": "all"}[family],
        step__accumulation=4, data__batch_size=1, data__sources=[{"path": str(PHOTOS), "repeats": 4}],
        memory__gradient_checkpointing=True, model__components={DENOISER[family]: {"dtype": "fp8_e4m3"}},
    )  # fmt: skip
    with built(config) as run:
        counted = CountedKernels()
        for layer in run.adapter.layers.values():
            layer.get_base_layer().kernels = counted
        run.adapter.mark_stale()  # the first norms are computed before the first step
        updates = run.updates()
        for step in (1, 2):
            update = next(updates)
            assert len(update) == 4
            take_step(run, step, update)
            assert len(counted.norms) == len(run.adapter.layers)
            assert set(counted.norms.values()) == {step}
        assert all(layer.stale for layer in run.adapter.layers.values())
        # Where nothing changed, a forward computes none.
        with torch.no_grad():
            inputs = inputs_for(family, run)
            run.model.modules[DENOISER[family]](**inputs)
            run.model.modules[DENOISER[family]](**inputs)
        assert set(counted.norms.values()) == {3}


def test_norms_are_refreshed_before_the_blocks_forward() -> None:
    """By the hook of the innermost owner: inside a forward nothing is stale any more."""
    model = nn.Sequential(network(FORMATS["fp8_e4m3"]), nn.Identity())
    adapter = inject(
        {"net": model},
        [Target("net", f"0.{name}", 2, 2.0) for name in ("0", "2")],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(KINDS["dora"]),
        seed=0,
    )
    adapter.refresh_before({"net": model, "net.0": model[0]})
    seen = []
    model[0][1].register_forward_pre_hook(lambda *_: seen.append([x.stale for x in adapter.layers.values()]))
    model.register_forward_pre_hook(lambda *_: seen.append([x.stale for x in adapter.layers.values()]))
    jitter(adapter)
    model(torch.randn(2, 6, 5, 5))
    # The root owns no layer of its own: its pre-forward leaves them stale for their block.
    assert seen == [[True, True], [False, False]]


class LargestAllocation(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes in fp32 or wider."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            known = {a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if torch.is_tensor(a)}
            if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in known and t.element_size() >= 4:
                self.largest = max(self.largest, t.numel())
        return result


@pytest.mark.parametrize("format", ALL_FORMATS[1:], ids=FORMAT_IDS[1:])
@pytest.mark.parametrize("rows", [8, 160])
def test_no_wide_temporary_of_the_weights_size(format: Format, rows: int, monkeypatch) -> None:
    """A refresh, a forward and a backward in bf16 make no fp32 tensor beyond a piece, whatever the base.

    With few rows g * G is made, with many g * W: in bf16, in the shared buffer, of which there is one. The other buffers hold
    pieces.
    """
    monkeypatch.setattr(decode, "PIECE", 1 << 12)  # of a small layer, whose products take no time
    scratch_module._buffers.clear()
    compute = torch.bfloat16
    n, k = 192, 128
    layer = FrozenLinear(k, n, bias=True, format=format, compute_dtype=compute, kernels=dora_torch)
    layer.load_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / 40)
    layer.bias.data.zero_()
    adapter = with_adapter(nn.Sequential(layer), names=("0",))
    (adapted_layer,) = adapter.layers.values()
    x = torch.randn(rows, k).to(compute).requires_grad_()
    with LargestAllocation() as allocations:
        adapted_layer(x).sum().backward()
    large = [buffer for buffer, _ in scratch_module._buffers.values() if buffer.numel() > decode.PIECE]
    assert [(buffer.dtype, buffer.numel() <= n * k) for buffer in large] in ([], [(compute, True)])
    assert bool(large) == (rows > 8 or format.dtype != compute)
    assert n * k > 4 * decode.PIECE
    assert 0 < allocations.largest <= decode.PIECE


PEAK = """
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from trainer.adapters import Method, Target, inject
from trainer.adapters.kinds import KINDS
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

def peak(model, adapter=None):
    x = torch.randn(16, n).bfloat16().requires_grad_()
    open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM
    before = status("VmRSS:")
    if adapter is not None:
        adapter.mark_stale()
    model(x).sum().backward()
    return status("VmHWM:") - before

n = 4096
nn.Linear(8, 8).bfloat16()(torch.randn(2, 8).bfloat16()).sum().backward()
common = dict(bias=True, format=FORMATS["bf16"], compute_dtype=torch.bfloat16, kernels=dora_torch)
frozen = nn.Sequential(FrozenLinear(n, n, **common))
frozen[0].payload_weight.normal_(generator=torch.Generator().manual_seed(0))
frozen[0].bias.data.zero_()
print(peak(frozen))
ours = nn.Sequential(FrozenLinear(n, n, **common))
ours[0].payload_weight.normal_(generator=torch.Generator().manual_seed(0))
ours[0].bias.data.zero_()
adapter = inject({"net": ours}, [Target("net", "0", 8, 8.0)], bases=(FrozenLinear,), method=Method(KINDS["dora"]), seed=0)
print(peak(ours, adapter))
theirs = nn.Sequential(nn.Linear(n, n).bfloat16())
print(peak(inject_adapter_in_model(LoraConfig(r=8, use_dora=True, target_modules=["0"]), theirs)))
"""


@pytest.mark.slow
def test_peak_memory_of_a_large_layer() -> None:
    """Over what the frozen layer takes, a step at 4096 x 4096 adds less than a quarter of the fp32 weight's 64 MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    frozen, ours, theirs = map(float, done.stdout.split())
    assert ours - frozen < 16
    assert theirs - frozen > 32


def test_compiled_and_checkpointed_equal_eager() -> None:
    """One graph without breaks, traced through the written-out backward, over a quantised base."""
    for storage in ("fp32", "fp8_e4m3"):
        layer = FrozenLinear(24, 40, bias=True, format=FORMATS[storage], compute_dtype=torch.float32, kernels=dora_torch)
        g = torch.Generator().manual_seed(0)
        layer.load_weight(torch.randn(40, 24, generator=g))
        layer.bias.data.normal_(generator=g)
        layer.bias.data[3:5] = 1000  # these two save their z0
        adapter = with_adapter(nn.Sequential(layer), names=("0",))
        (adapted_layer,) = adapter.layers.values()
        assert adapted_layer.z_rows.tolist() == [3, 4]
        adapted_layer.part()
        x = torch.randn(5, 24, generator=g)
        compiled = torch.compile(adapted_layer, backend="aot_eager", fullgraph=True)
        results = []
        # Compiled first: what an eager call would leave behind must not be needed.
        for function in (
            compiled,
            adapted_layer,
            lambda x, layer=adapted_layer: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        ):
            leaf = x.clone().requires_grad_()
            for parameter in adapter.named_parameters().values():
                parameter.grad = None
            y = function(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in adapter.named_parameters().values())])
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert torch.equal(one, two)


def test_the_rows_that_save_z0_follow_from_the_frozen_weights() -> None:
    """Rows of zeros and of large biases, whatever the adapter; None where there are none."""
    model = network(FORMATS["fp8_e4m3"], torch.bfloat16)
    conv, linear = model[0], model[2]
    linear.load_weight(linear.dequantize(torch.float32).index_fill(0, torch.tensor([5]), 0))
    linear.bias.data.copy_(linear.row_norms() * LARGE_BIAS * 0.99)
    linear.bias.data[[7, 20]] *= torch.tensor([1.02, -20.0])
    conv.bias.data.copy_(conv.row_norms() * LARGE_BIAS * 0.99)
    adapter = with_adapter(model)
    layers = [adapter.layers[f"net.{name}"] for name in ("0", "2", "3")]
    for _ in range(2):
        assert layers[1].z_rows.tolist() == [5, 7, 20] and layers[0].z_rows is None and layers[2].z_rows is None
        assert not any("z_rows" in name for name in model.state_dict())
        jitter(adapter)
        layers[1].update_layer("second", 2, 4.0, _config(True))
        for layer in layers:
            layer.mark_stale()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_no_model_changes_an_adapted_output_in_place(bench: Workbench, family: str) -> None:
    """The backward reads it, so torch would refuse. Every layer has an adapter, in the text encoders too."""
    encoders = [{"component": name, "match": "*"} for name in ("text_encoder", "text_encoder_2")]
    config = bench.config(
        family, adapter__type="dora", adapter__targets="all", adapter__rules=encoders, data__caption_dropout=0.0
    )
    with built(config) as run:
        jitter(run.adapter)
        losses = run.step.losses(run.reader[next(run.updates())[0]])
        losses.sum().backward()
        magnitudes = [p for name, p in run.adapter.named_parameters().items() if name.endswith("magnitude_vector")]
        assert len(magnitudes) == len(run.adapter.layers) > 50 and all(p.grad.any() for p in magnitudes)


def test_two_layers_of_one_shape_share_the_buffer_and_keep_their_gradients() -> None:
    """The shared buffer holds the second layer's weight when the first one's backward begins."""
    g = torch.Generator().manual_seed(0)
    layers = nn.Sequential(*(
        FrozenLinear(16, 16, bias=True, format=FORMATS["int4"], compute_dtype=torch.float32, kernels=dora_torch)
        for _ in range(3)
    ))  # fmt: skip
    for layer in layers:
        layer.load_weight(torch.randn(16, 16, generator=g))
        layer.bias.data.zero_()
    # One layer frozen without an adapter between two adapted ones.
    dense = [layer.dequantize(torch.float64) for layer in layers]
    adapter = with_adapter(layers, names=("0", "2"))
    x = torch.randn(4, 16, generator=g, requires_grad=True)
    layers(x).square().sum().backward()
    for index in (0, 2):
        layer = adapter.layers[f"net.{index}"]
        dense[index] = layer.adapted_weight(ADAPTER_NAME).double()
    x64 = x.detach().double().requires_grad_()
    F.linear(F.linear(F.linear(x64, dense[0]), dense[1]), dense[2]).square().sum().backward()
    assert (x.grad - x64.grad).norm() <= 1e-5 * x64.grad.norm()


def test_norms_refreshed_around_a_merge_are_the_bases() -> None:
    """A stale layer that is merged, refreshed by its block's hook, and unmerged again computes as before."""
    model = network(FORMATS["fp8_e4m3"])
    adapter = with_adapter(model)
    x = torch.randn(2, 6, 5, 5)
    expected = model(x)
    deltas = [layer.get_delta_weight(ADAPTER_NAME) for layer in adapter.layers.values()]
    adapter.mark_stale()
    for layer, delta in zip(adapter.layers.values(), deltas, strict=True):
        layer.merge()
        layer.part()
        assert torch.equal(layer.get_delta_weight(ADAPTER_NAME), delta)
    for layer in adapter.layers.values():
        layer.unmerge()
    assert torch.equal(model(x), expected)


def test_what_is_not_supported_says_so() -> None:
    model = network(FORMATS["fp8_e4m3"])
    adapter = with_adapter(model, names=("3",))
    (layer,) = adapter.layers.values()
    x = torch.randn(4, 40, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    layer.update_layer("second", 2, 2.0, _config(True))
    layer.set_adapter([ADAPTER_NAME, "second"])
    with pytest.raises(ValueError, match="one adapter can be active at a time"):
        layer(x)


@pytest.mark.parametrize("dora", [False, True])
def test_parameters_may_be_swapped(dora: bool) -> None:
    """The layer computes with the parameters its modules hold now, not with those of its first call."""
    model = network(FORMATS["fp32"])
    with_adapter(model, dora=dora)
    x = torch.randn(2, 6, 5, 5)
    before = model(x)
    for kind in ("lora_B", "lora_magnitude_vector")[: 1 + dora]:
        others = {name: 2 * p.detach() for name, p in model.named_parameters() if kind in name}
        after = torch.func.functional_call(model, others, (x,))
        assert not torch.allclose(after, before)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("dora", [False, True])
def test_what_libraries_do_to_a_layer_is_seen(dora: bool) -> None:
    """Scales set by PEFT, a state that is loaded, a module that moves, a forward in inference mode: none leaves old casts."""
    model = network(FORMATS["bf16"], compute=torch.bfloat16)
    adapter, x = with_adapter(model, dora=dora), torch.randn(2, 6, 5, 5)
    with torch.inference_mode():
        before = model(x).clone()
    model(x).float().square().sum().backward()  # what was made in inference mode would be refused here
    layers = list(adapter.layers.values())
    for layer in layers:
        layer.scale_layer(3.0)
    assert not torch.equal(model(x), before)
    for layer in layers:
        layer.unscale_layer(3.0)
    assert torch.equal(model(x), before)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(t) if "lora_B" in name else t for name, t in state.items()})
    assert not torch.equal(model(x), before)
    model.load_state_dict(state)
    assert torch.equal(model(x), before)
    kept = [tensor for layer in layers for tensor in (layer.part().ready.a, layer.part().ready.sb_NR)]
    places = {tensor.data_ptr() for tensor in kept}
    moved = [weakref.ref(layer.get_base_layer().qweight) for layer in layers]
    model._apply(torch.clone)
    assert all(weight() is None for weight in moved)  # nothing keeps what lay there
    now = [layer.part() for layer in layers]
    assert torch.equal(model(x), before)
    assert not places & {t.data_ptr() for part in now for t in (part.ready.a, part.ready.sb_NR)}


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_a_frozen_layer_computes_with_the_buffers_that_it_has(storage: str) -> None:
    """Also where a library put others in their places, for good or for one call."""
    one, other = (
        FrozenLinear(8, 6, bias=False, format=FORMATS[storage], compute_dtype=torch.bfloat16, kernels=dora_torch)
        for _ in range(2)
    )
    for seed, layer in enumerate((one, other)):
        layer.load_weight(torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
    x = torch.randn(2, 8).bfloat16()
    assert not torch.equal(one(x), other(x))
    assert torch.equal(torch.func.functional_call(one, dict(other.named_buffers()), x), other(x))
    assert not torch.equal(one(x), other(x))
    one.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(one(x), other(x))


def test_layers_that_are_off_are_not_refreshed() -> None:
    model = network(FORMATS["fp32"])
    adapter, x = with_adapter(model, dora=True), torch.randn(2, 6, 5, 5)
    adapter.refresh_before({"net": model})
    for layer in adapter.layers.values():
        layer.enable_adapters(False)
        layer.mark_stale()
    model(x)
    assert all(layer.stale for layer in adapter.layers.values())


def test_grouped_convolutions_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    freeze_layers(
        model, storage_of_layers(format=FORMATS["fp32"], compute=torch.float32, unquantised=torch.float32), dora_torch
    )
    with pytest.raises(UserError, match=r"net\.0 is a grouped convolution \(groups = 2\)"):
        inject(
            {"net": model},
            [Target("net", "0", 2, 2.0)],
            bases=(FrozenLinear, FrozenConv2d),
            method=Method(KINDS["dora"]),
            seed=0,
        )


def test_choice_of_kernels() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose("auto", cpu) is dora_torch and choose("torch", cpu) is dora_torch and choose("torch", cuda) is dora_torch
    with pytest.raises(
        UserError,
        match="adapter.kernels = 'triton' needs a CUDA device of compute capability 8.0 or newer, this run is on cpu",
    ):
        choose("triton", cpu)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("dora", [False, True])
def test_shared_inputs_change_nothing_but_the_reads(bench: Workbench, family: str, dora: bool) -> None:
    """Output and gradients with q, k and v sharing x equal those without, to fp32 rounding; and they do share."""
    denoiser = DENOISER[family]
    config = bench.config(
        family, adapter__type="dora" if dora else "lora", adapter__targets="linear",
        adapter__rules=[{"component": denoiser, "match": "*to_k", "rank": 2, "alpha": 3.0}],
        model__components={denoiser: {"dtype": "fp8_e4m3"}},
    )  # fmt: skip
    with built(config) as run:
        jitter(run.adapter)
        model, inputs = run.model.modules[denoiser], inputs_for(family, run)
        layers = run.adapter.layers

        def results() -> list[torch.Tensor]:
            for parameter in run.adapter.named_parameters().values():
                parameter.grad.zero_()
            y = model(**inputs).sample
            y.square().sum().backward()
            return [y.detach(), *(p.grad.clone() for p in run.adapter.named_parameters().values())]

        calls: Counter = Counter()
        original = SharedInput.output

        def counted(self, layer, x):
            calls["taken" if x is self.x and layer in self.outputs else "computed"] += 1
            return original(self, layer, x)

        SharedInput.output = counted
        try:
            together = results()
        finally:
            SharedInput.output = original
        groups = {id(layer.shared): layer.shared for layer in layers.values() if layer.shared is not None}
        # Every group computed once and every other member took its output; nothing is left waiting.
        assert calls["computed"] == len(groups)
        assert calls["taken"] == sum(len(group.layers) - 1 for group in groups.values()) > 0
        assert all(group.x is None and not group.outputs for group in groups.values())
        names = {name.rpartition(".")[2] for name, layer in layers.items() if layer.shared is not None}
        assert names >= {"sdxl": {"to_q", "to_k", "to_v"}, "flux": {"to_q", "add_k_proj", "proj_mlp"}}[family]

        for layer in layers.values():
            layer.shared = None
        apart = results()
    for one, other in zip(together, apart, strict=True):
        assert (one - other).norm() <= GRADIENT_TOLERANCE * other.norm()


def test_shared_outputs_are_never_stale() -> None:
    """Called alone, with another tensor, after an update, or first without and then with gradients."""
    model = nn.ModuleDict(
        {
            name: FrozenLinear(6, 5, bias=True, format=FORMATS["fp32"], compute_dtype=torch.float32, kernels=dora_torch)
            for name in "qkv"
        }
    )
    g = torch.Generator().manual_seed(0)
    for layer in model.values():
        layer.load_weight(torch.randn(5, 6, generator=g))
        layer.bias.data.zero_()
    adapter = with_adapter(model, names=tuple("qkv"))
    adapter.share_inputs("net", [tuple("qkv")])
    q, k, v = (adapter.layers[f"net.{name}"] for name in "qkv")
    assert q.shared is k.shared is v.shared is not None

    def alone(layer, x):
        shared, layer.shared = layer.shared, None
        y = layer(x)
        layer.shared = shared
        return y

    def same(layer, x):
        return torch.allclose(layer(x), alone(layer, x), rtol=1e-5, atol=1e-6)

    x, other = torch.randn(3, 6, generator=g), torch.randn(3, 6, generator=g)
    assert same(q, x)  # k and v wait
    assert same(k, other) and same(v, x)
    assert same(q, x)
    jitter(adapter, seed=5)  # an update, with outputs of the old parameters waiting
    assert same(k, x) and same(v, x)
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad
    assert same(q, x.clone())
    with adapter.at_strength(0.5):
        assert same(q, x) and same(k, x)
    unmerged = q(x)
    q.merge()
    assert same(k, x) and torch.allclose(q(x), unmerged, rtol=1e-5, atol=1e-6)
    k(x)
    assert not k.shared.outputs, "nothing was computed for a merged sibling, which would not fetch it"
    q.unmerge()
    assert same(q, x) and same(k, x)
    with torch.no_grad():
        q(x)
        x.mul_(2)  # between the siblings
        assert same(k, x) and same(v, x)
    for layer in (q, k, v):
        config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q"])
        layer.update_layer("second", 2, 2.0, config)
        layer.lora_B["second"].weight.data.normal_()
        layer.lora_A["second"].weight.data.normal_()
        layer.set_adapter("second")
        layer.train()
    assert not torch.equal(k(x), k(x)), "each call drops inputs of its own"


def test_adapters_with_dropout_do_not_share() -> None:
    model = network(FORMATS["fp32"])
    adapter = inject(
        {"net": model},
        [Target("net", "2", 2, 2.0), Target("net", "3", 2, 2.0)],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(KINDS["lora"], dropout=0.5),
        seed=0,
    )
    adapter.share_inputs("net", [("2", "3")])
    assert not any(layer.shared.applies(torch.randn(2, 25)) for layer in adapter.layers.values())

"""Which of torch's kernels compute the denoiser's attention, and what a kernel has to do before it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import cuda

from tests.numerics.test_attention import block
from trainer.base import memory
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.runtime import attention
from trainer.runtime.attention import ORDER, TORCHS_OWN, Attention

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
ATTENTION = nn.functional.scaled_dot_product_attention


def kernels() -> dict[str, bool]:
    """Which of them torch would take just now."""
    return {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


@pytest.fixture
def tried(monkeypatch) -> dict[str, Any]:
    """A card that is not here: its "capability", and what `fault` says of a kernel that is "wrong"; and what was asked."""
    card: dict[str, Any] = {"capability": (9, 0), "wrong": {}, "asked": []}

    def fault(kind: str, *given: object) -> str:
        card["asked"].append((kind, *given))
        return card["wrong"].get(kind, "")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card["capability"])
    monkeypatch.setattr(attention, "fault", fault)
    return card


def chosen(asked: str, device: torch.device = CARD) -> Attention:
    return attention.choose(asked, device, torch.bfloat16, lambda: {64}, 4096)


@pytest.mark.parametrize(
    ("capability", "kinds"),
    [((7, 5), ()), ((8, 0), ()), ((8, 9), ()), ((9, 0), ORDER), ((10, 0), ORDER), ((10, 3), ORDER), ((12, 0), ())],
)
def test_the_card_decides(tried, capability: tuple[int, int], kinds: tuple[str, ...]) -> None:
    """cuDNN's comes first on Hopper and on Blackwell in data centres, and there only once it was tried."""
    tried["capability"] = capability
    assert chosen("auto") == Attention(kinds)
    assert tried["asked"] == [("cudnn", CARD, torch.bfloat16, {64}, 4096)] * bool(kinds)


def test_a_kernel_that_fails_its_trial_is_not_taken(tried) -> None:
    tried["wrong"] = {"cudnn": "its results are not finite", "flash": "too old"}
    found = chosen("auto")
    assert found.kinds == () and found.note == "without cuDNN's: its results are not finite" and str(found) == "torch's own"
    for kind in ("cudnn", "flash"):
        with pytest.raises(UserError, match=rf"step\.attention = '{kind}' is not for this model on a card: .*; use 'auto'"):
            chosen(kind)
    assert chosen("efficient") == Attention(("efficient",))
    tried["asked"].clear()
    assert chosen("math") == Attention(("math",)) and not tried["asked"], "others are compared with it"


def test_a_cpu_has_two() -> None:
    assert chosen("auto", CPU) == TORCHS_OWN and chosen("math", CPU) == Attention(("math",))
    for kind in ("flash", "cudnn", "efficient"):
        with pytest.raises(UserError, match=rf"step\.attention = '{kind}' needs a GPU, .* on the CPU; use 'auto' or 'math'"):
            chosen(kind, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_a_sound_kernel_passes_its_trial(dtype: torch.dtype) -> None:
    assert attention.fault("flash", CPU, dtype, (4, 64, 128)) == ""


def test_a_kernel_that_torch_lacks_is_told_with_torchs_reason() -> None:
    """A CPU has none of CUDA's."""
    assert attention.fault("efficient", CPU, torch.bfloat16, (64,)).startswith("No viable backend")


def test_the_reason_of_a_card_is_torchs_warning(monkeypatch) -> None:
    import warnings

    def can_use(params: object, debug: bool) -> bool:
        warnings.warn("Flash attention only supports gpus of these kinds. (Triggered internally at x.cpp:1.)", stacklevel=1)
        return False

    def none(*_: Tensor) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(cuda, "can_use_flash_attention", can_use)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", none)
    said = attention.fault("flash", CPU, torch.bfloat16, (64,))
    assert said == "Flash attention only supports gpus of these kinds (head size 64)"


def without_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose exponents are those of the scores themselves."""
    weights = (query.float() @ key.float().transpose(-1, -2) / query.shape[-1] ** 0.5).exp()
    return (weights / weights.sum(-1, keepdim=True) @ value.float()).to(query.dtype)


def too_large(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Its gradients are 3 % off, and its output is not."""
    out = ATTENTION(query, key, value)
    return 1.03 * out - 0.03 * out.detach()


def beyond_the_last_tile(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """It leaves out the keys after the last whole 128, where queries are as many."""
    whole = key.shape[-2] // 128 * 128 if query.shape[-2] == key.shape[-2] else key.shape[-2]
    return ATTENTION(query, key[..., :whole, :], value[..., :whole, :])


@pytest.mark.parametrize(
    ("kernel", "said"),
    [(without_maximum, "not finite where"), (too_large, "differ by 0.03 from"), (beyond_the_last_tile, "differ by 0.")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_wrong_kernel_fails_its_trial(monkeypatch, kernel, said: str, dtype: torch.dtype) -> None:
    def by_kind(*given: Tensor) -> Tensor:
        return ATTENTION(*given) if attention.only_plain() else kernel(*given)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", by_kind)
    assert said in attention.fault("flash", CPU, dtype, (64,))
    assert attention.fault("math", CPU, dtype, (64,)) == ""


def test_a_kernel_that_is_wrong_for_the_runs_images_alone_fails_its_trial(monkeypatch) -> None:
    def by_length(*given: Tensor) -> Tensor:
        return ATTENTION(*given) * (torch.inf if given[0].shape[-2] > 256 else 1)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", by_length)
    assert attention.fault("flash", CPU, torch.bfloat16, (64,)) == ""
    assert "not finite where" in attention.fault("flash", CPU, torch.bfloat16, (64,), 320)


def test_a_cudnn_that_was_seen_to_be_wrong_is_not_even_tried(monkeypatch) -> None:
    """It reads outside of its memory, and the process would be lost."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert "cuDNN 9.19 was seen to give wrong gradients" in attention.fault("cudnn", CPU, torch.bfloat16, (64,))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert attention.fault("cudnn", CPU, torch.bfloat16, (64,)).startswith("No viable backend")


def test_a_choice_holds_inside_its_block_and_in_its_order() -> None:
    before, order = kernels(), torch._C._get_sdp_priority_order()
    named = Attention(("cudnn", "flash"))
    with named.used():
        assert kernels() == {"flash": True, "cudnn": True, "efficient": False, "math": False}
        first = torch._C._get_sdp_priority_order()[:2]
        assert first == [int(attention.KERNELS[kind]) for kind in named.kinds]
        with TORCHS_OWN.used():
            assert kernels()["cudnn"], "none named: as it is"
    assert (kernels(), torch._C._get_sdp_priority_order()) == (before, order)
    with pytest.raises(KeyError), Attention(("math",)).used():
        assert attention.only_plain()
        raise KeyError
    assert kernels() == before and not attention.only_plain()


@pytest.mark.parametrize("device", [CPU, CARD], ids=["CPU", "GPU"])
def test_a_named_kind_is_that_of_the_whole_forward_and_of_nothing_else(device: torch.device) -> None:
    """Torch's own: on a CPU few tokens in fp32, elsewhere what blocks may keep."""
    layers, x = block("flux")
    denoiser = layers[0]
    TORCHS_OWN.give(denoiser, FAMILIES["flux"].memory.attention, device)
    attend = attention.attention if device == CPU else attention.attention_once
    assert "forward" not in vars(denoiser) and denoiser.processor.attend is attend

    layers, x = block("flux")
    denoiser, seen = layers[0], []
    Attention(("math",)).give(denoiser, FAMILIES["flux"].memory.attention, device)
    assert denoiser.processor.attend is attention.attention_once
    denoiser.to_v.register_forward_hook(lambda *_: seen.append(attention.only_plain()))
    with torch.profiler.profile() as profile:
        denoiser(x)
    called = {event.key for event in profile.key_averages()}
    assert seen == [True] and not attention.only_plain()
    assert "aten::_scaled_dot_product_attention_math" in called
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in called


def test_what_torch_takes_of_an_order_is_told() -> None:
    """cuDNN's and the memory-efficient kernel are none of a CPU's."""
    for kinds, taken in (((), "flash"), (ORDER, "flash"), (("math",), "math"), (("cudnn", "efficient", "math"), "math")):
        assert Attention(kinds).selected(CPU, torch.bfloat16, {8, 64}, 12) == taken


def test_head_sizes_are_those_of_every_attention_layer() -> None:
    assert attention.head_sizes(nn.ModuleList([block("flux")[0], block("sdxl")[0], nn.Linear(2, 2)])) == {16}


@pytest.mark.parametrize("backend", [*attention._ON_CARD], ids=str)
def test_what_a_cards_kernel_gives_is_what_its_backward_takes(backend: int) -> None:
    """Of torch's own forms of these operators, on a card that is not here: of another token count than the queries', too."""
    kernel = attention._ON_CARD[backend]
    with FakeTensorMode():
        query, key = (torch.empty(2, n, 3, 64, dtype=torch.bfloat16, device=CARD).transpose(1, 2) for n in (96, 40))
        made = kernel.forward(query, key, key)
        gradients = kernel.gradients(torch.empty_like(made[0]), query, key, key, *made)
    assert made[0].shape == query.shape and len(gradients) == 3
    assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]
    assert {each.dtype for each in (made[0], *gradients)} == {torch.bfloat16}


def test_masks_plain_attention_and_padded_heads_keep_nothing() -> None:
    """They are computed again with the block, and so is what a block that keeps nothing asks for."""
    x = torch.randn(1, 2, 8, 12)
    assert attention._fused(x, x, x) is None and attention._fused(x[..., :8], x[..., :8], x[..., :8]) is not None
    with Attention(("math",)).used():
        assert attention._fused(x[..., :8], x[..., :8], x[..., :8]) is None


def test_a_mask_is_there_in_a_block_that_keeps() -> None:
    """And in its gradients: such attention is made again."""
    x = torch.randn(1, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    block = nn.Module()
    block.forward = lambda x: attention.attention_once(x, x, x, mask)
    given = [x.clone().requires_grad_() for _ in range(2)]
    memory.checkpoint_blocks({"block": block}, "selective")
    for out in (made := [block(given[0]), ATTENTION(given[1], given[1], given[1], mask)]):
        out.square().sum().backward()
    assert torch.equal(*made) and torch.equal(given[0].grad, given[1].grad)

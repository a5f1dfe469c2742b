"""What torch's functions do with tensors that have no values, and what they leave as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from tests.harness import Workbench
from trainer import config as configs
from trainer.base.memory import checkpoint_blocks
from trainer.kernels import dora_torch, scratch
from trainer.models import FAMILIES
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.runtime import attention
from trainer.runtime.attention import Attention
from workbench.hub import hub
from workbench.planning.dry_run import META, Rehearsal, Unread, without_values
from workbench.planning.op_trace import Trace


def test_a_tensor_without_values_is_asked_nothing() -> None:
    tensor = torch.empty(4, device=META)
    with without_values():
        assert not (tensor > 0).any() and not torch.isfinite(tensor).all()
        assert (tensor == 1).nonzero().tolist() == [[0]]
        assert tensor.cpu() is tensor and tensor.to("cpu").is_meta and tensor.to(torch.device("cpu")).is_meta
        assert tensor.to("cpu", torch.float16).dtype == tensor.to(device="cpu", dtype=torch.float16).dtype == torch.float16
        assert tensor.numpy().tolist() == [0.0] * 4
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(tensor[0])


def test_a_tensor_with_values_keeps_them() -> None:
    x = torch.arange(4.0)
    query = torch.randn(1, 2, 3, 8)
    expected = scaled_dot_product_attention(query, query, query), rms_norm(x, (4,))
    with without_values():
        assert x[1] and not x[0]
        assert x.nonzero().flatten().tolist() == [1, 2, 3] and x.numpy().tolist() == x.cpu().tolist() == [0, 1, 2, 3]
        assert x.to(META).is_meta and x.to("cpu", torch.float16).dtype == torch.float16
        found = scaled_dot_product_attention(query, query, query), rms_norm(x, (4,))
    assert all(map(torch.equal, expected, found))


class Block(nn.Module):
    """Attention and a norm, as a denoiser's block has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, device=META)

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*[self.norm(x)] * 3)


def operators(*, on_cpu: bool, recomputed: bool, again: bool) -> dict[str, int]:
    """What a forward and a backward of the block launch. again: its forward has the mode in the recomputation, too."""
    block, x = Block(), torch.empty(1, 2, 3, 8, device=META, requires_grad=True)
    if again:
        components = Unread.__new__(Unread)
        components.on_cpu = on_cpu
        block.forward = components.with_its_own_mode(block.forward)
    checkpoint_blocks({"0": block}, recomputed)
    with without_values(on_cpu=on_cpu), Trace() as trace:
        block(x).sum().backward()
    return trace.by_name


@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "accelerator"])
def test_attention_is_one_operator_in_a_recomputation_too(on_cpu: bool) -> None:
    """torch turns modes off in a backward pass. On an accelerator RMSNorm is one operator as well."""
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for recomputed, count in ((False, 1), (True, 2)):
        found = operators(on_cpu=on_cpu, recomputed=recomputed, again=True)
        assert found[name] == count and "aten::_softmax" not in found
        assert found["aten::native_layer_norm"] == (0 if on_cpu else count)
    alone = operators(on_cpu=on_cpu, recomputed=True, again=False)
    assert alone[name] == 1 and "aten::_safe_softmax" in alone, "or the case shows nothing"


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_plain_attention_keeps_its_scores(recomputed: bool) -> None:
    """Where it was asked for, a plan has them: the fused operator keeps none."""
    with Attention(("math",)).used():
        found = operators(on_cpu=False, recomputed=recomputed, again=True)
    assert found["aten::_safe_softmax"] == 1 + recomputed
    assert found["aten::_scaled_dot_product_flash_attention_for_cpu"] == 0


def test_buffers_of_a_rehearsal_are_its_own() -> None:
    kept = scratch.scratch((3,), torch.float32, META)
    with scratch.own_buffers():
        assert scratch.scratch((2,), torch.float32, META).untyped_storage().nbytes() == 8
    assert scratch.scratch((3,), torch.float32, META).untyped_storage()._cdata == kept.untyped_storage()._cdata


@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "accelerator"])
@pytest.mark.parametrize("kind", ["auto", "math"])
def test_attention_is_that_of_the_device_which_is_planned_for(bench: Workbench, on_cpu: bool, kind: str) -> None:
    config = configs.parse(bench.tree("flux", adapter__targets=["*attn.to_q"], step__attention=kind))
    source = open_source(config, hub)
    run = Rehearsal(make_plan(resolve(config, source), source, processes=1), kernels=dora_torch, on_cpu=on_cpu)
    with without_values(on_cpu=on_cpu):
        run.trained  # noqa: B018
    layers = [layer for layer in run.components.model.modules["transformer"].modules() if hasattr(layer, "set_processor")]
    attend = attention.attention if on_cpu and kind == "auto" else attention.attention_once
    assert layers and all(layer.processor.attend is attend for layer in layers)
    assert ("forward" in vars(run.components.model.modules["transformer"])) == (kind == "math")


@pytest.mark.parametrize("family", ["flux", "flux2"])
def test_a_tokenizer_that_was_not_fetched_gives_as_many_tokens_as_are_read(
    bench: Workbench, monkeypatch, family: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_id = next(iter(FAMILIES[family].files.hub_ids))
    config = configs.parse(bench.tree("sdxl", model__family=family, model__path=hub_id, adapter__targets=["*attn.to_q"]))
    source = open_source(config, hub)
    plan = make_plan(resolve(config, source), source, processes=1)
    model = Rehearsal(plan, kernels=dora_torch).components.model
    (*_, last), captions = plan.model.family.text_encoders, ["a bear", "a long one of a bear"]
    assert not source.fetched
    assert [ids.shape[-1] for ids in plan.model.family.text.tokens(model, last, captions)] == [512, 512]

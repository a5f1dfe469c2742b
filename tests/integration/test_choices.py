"""Choices that a user makes and that must not be lost on the way: strengths, rules, data, blocks, where to resume from."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from tests.harness import DENOISER, PHOTOS, Workbench, built, metrics_of, take_step
from trainer import config as configs
from trainer import models
from trainer.adapters import Rule, match_targets
from trainer.base.errors import UserError
from trainer.base.memory import checkpoint_blocks, find_blocks, recomputing
from trainer.checkpoint import store
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.kernels import dora_torch
from trainer.models import flux
from trainer.quantization import FrozenConv2d, FrozenLayer, FrozenLinear
from trainer.run.run import Run
from trainer.runtime import attention
from trainer.runtime.jobs import Position
from workbench.commands import main as cli

pytestmark = pytest.mark.usefixtures("few_draws")

FEW = ["up_blocks.1.attentions.*attn1.to_q"]  # late layers: a short backward pass


def run(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


def pixels(path) -> bytes:
    from PIL import Image

    return Image.open(path).tobytes()


@pytest.mark.slow
def test_sample_strengths_are_each_samples_own(bench: Workbench) -> None:
    """Also over a trained text encoder: strength 0 is the base in the encoding too."""
    rules = [{"component": "text_encoder", "match": "*self_attn*proj"}]
    samples = [{"prompt": "a bear", "strength": s} for s in (0.0, 0.5, 1.0)]
    tree = bench.tree(
        adapter__rules=rules, adapter__type="dora", optimizer__lr=2e-2, run__max_steps=2,
        validation__every_steps=2, validation__steps=1, validation__samples=samples,
    )  # fmt: skip
    assert run(bench, tree) == 0
    before, after = (bench.tmp / "out" / "samples" / f"step-{step:08d}" for step in (0, 2))
    base = pixels(before / "00.png")
    assert pixels(after / "00.png") == base
    assert len({pixels(after / f"{i:02d}.png") for i in range(3)}) == 3


def test_rules_keep_what_earlier_rules_said() -> None:
    layers = {"unet": ["a.to_q", "a.to_k"], "text_encoder": ["b.q"]}

    def alphas(rules, alpha=None):
        targets = match_targets(
            layers, denoiser="unet", targets=["*"], presets={}, rules=rules, rank=8, alpha=alpha
        )  # fmt: skip
        return {t.name: (t.rank, t.alpha, t.lr) for t in targets}

    both = [Rule("unet", "*", alpha=1.0), Rule("unet", "*to_q", lr=1e-5)]
    assert alphas(both) == {"a.to_q": (8, 1.0, 1e-5), "a.to_k": (8, 1.0, None)}
    assert alphas([Rule("unet", "*to_q", rank=4)])["a.to_q"] == (4, 4, None), "alpha follows the rank when left out"
    assert alphas([Rule("unet", "*to_q", rank=4)], alpha=2.0)["a.to_q"] == (4, 2.0, None)
    assert alphas([Rule("text_encoder", "b.*", rank=2)])["b.q"] == (2, 2, None)


def test_a_rule_is_of_its_component_and_of_none_whose_name_begins_alike() -> None:
    """OneTrainer #1671: a filter for text_encoder took text_encoder_2's layers, too."""
    layers = {"unet": ["a.to_q"], "text_encoder": ["b.q"], "text_encoder_2": ["b.q", "c.q"]}
    for component in ("text_encoder", "text_encoder_2"):
        rules = [Rule(component, "*", rank=2)]
        targets = match_targets(layers, denoiser="unet", targets=["*"], presets={}, rules=rules, rank=8, alpha=None)
        assert {t.component: t.rank for t in targets} == {"unet": 8, component: 2}
    for pattern in ("text_encoder.*", "text_encoder*", "c.q"):
        with pytest.raises(UserError, match="matches no layer of text_encoder "):
            match_targets(
                layers, denoiser="unet", targets=["*"], presets={}, rules=[Rule("text_encoder", pattern)], rank=8, alpha=None
            )


@pytest.mark.slow
def test_rules_set_the_learning_rate(bench: Workbench) -> None:
    rules = [{"component": "unet", "match": "*to_q", "lr": 1e-30}]
    with built(bench.config(adapter__rules=rules, optimizer__lr=1e-2)) as training:
        before = {name: p.detach().clone() for name, p in training.adapter.named_parameters().items()}
        for step, update in zip(range(2), training.updates(), strict=False):
            take_step(training, step + 1, update)
        moved = {name for name, p in training.adapter.named_parameters().items() if not torch.equal(p, before[name])}
    assert moved and not any(".to_q." in name and "lora_A" in name for name in moved)
    assert any(".to_k." in name and "lora_A" in name for name in moved)


def gradients(training: Run) -> dict[str, torch.Tensor]:
    """Of the first batch, the adapter moved."""
    parameters = training.adapter.named_parameters()
    for parameter in parameters.values():
        parameter.grad = None
        torch.nn.init.constant_(parameter, 0.01)
    training.adapter.mark_stale()
    training.step.losses(training.reader[next(training.updates())[0]]).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def checkpoint_every(training: Run, every: bool | int | str) -> int:
    """In place of what the run was built with. Returns how many blocks are recomputed."""
    blocks = find_blocks(training.model.modules[training.family.denoiser], training.family.memory.blocks)
    for block in blocks.values():
        block.__dict__.pop("forward", None)
    return checkpoint_blocks(blocks, every, unread(training), training.family.memory.skipped)


def unread(training: Run) -> tuple[str, ...]:
    return tuple(training.family.memory.unread_beside(training.adapter.layers, half=training.plan.model.scales_loss))


# In fp16 the blocks of Flux clip what they give.
@pytest.mark.parametrize(
    ("family", "compute", "dtype"),
    [("sdxl", "bf16", "bf16"), ("sdxl", "fp16", "fp8_e4m3"), ("flux", "fp16", "bf16"), ("flux", "fp32", "fp8_e4m3")],
)
@pytest.mark.slow
def test_gradient_checkpointing_changes_no_gradient(
    bench: Workbench, monkeypatch, family: str, compute: str, dtype: str
) -> None:
    """And a recomputation leaves out products that nothing reads."""
    config = bench.config(
        family, memory__gradient_checkpointing=2, adapter__type="dora", precision__compute=compute,
        model__components={DENOISER[family]: {"dtype": dtype}},
    )  # fmt: skip
    with built(config) as training:
        denoiser = training.model.modules[training.family.denoiser]
        names = {module: name for name, module in denoiser.named_modules() if isinstance(module, FrozenLayer)}
        counts: Counter = Counter()

        def counting(product: Callable) -> Callable:
            def counted(self, x, weight):
                if weight.shape == self.weight_shape:
                    counts[names[self]] += 1
                return product(self, x, weight)

            return counted

        for kind in (FrozenLinear, FrozenConv2d):
            monkeypatch.setattr(kind, "product", counting(kind.product))
        second = gradients(training)
        asked = sum("forward" in block.__dict__ for block in find_blocks(denoiser, training.family.memory.blocks).values())
        wrapped, every, selective, plain = {}, {}, {}, {}
        for kind, found in (("selective", selective), (True, every), (False, plain)):
            wrapped[kind] = checkpoint_every(training, kind)
            counts.clear()
            found |= gradients(training)
            if kind:
                recomputed = dict(counts)
        patterns = unread(training)
    assert wrapped[False] == 0 and wrapped[True] > 2 and asked == -(-wrapped[True] // 2)
    for made in (every, second, selective):
        assert all(torch.equal(plain[name], made[name]) for name in plain)
    assert any(gradient.any() for gradient in plain.values())
    not_read = {name for name in recomputed if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert bool(not_read) == (compute != "fp16" or family == "sdxl") and set(counts.values()) == {1}, (
        "without it each product is made once"
    )
    # The layers before them are read by the activation between the two.
    before = {name for name in recomputed if name.endswith(("net.0.proj", "proj_mlp"))}
    assert before and {recomputed[name] for name in before} == {2}
    assert {recomputed[name] for name in not_read} <= {1}


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "again"), [("lora", (1, 1, 2)), ("dora", (2, 1, 2))])
def test_what_a_recomputed_block_does_not_make_again(
    bench: Workbench, monkeypatch, adapter: str, again: tuple[int, ...]
) -> None:
    """The last product of a LoRA, that of a DoRA which keeps it, and attention: how often each is made, recomputed whole
    and selectively; the gradients are the same. again: the last product, it selectively, attention. And a LoRA's weights are
    decoded for a recomputation and its backward pass together."""
    attended: Counter = Counter()

    of_torch = torch.nn.functional.scaled_dot_product_attention
    fused = attention._ON_CPU._replace(forward=partial(counted, attended, attention._ON_CPU.forward))
    monkeypatch.setattr(attention, "_ON_CPU", fused)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", partial(counted, attended, of_torch))
    config = bench.config(
        "flux", adapter__type=adapter, adapter__targets="attention+mlp", memory__gradient_checkpointing="selective",
        model__components={"transformer": {"dtype": "fp8_e4m3"}},
    )  # fmt: skip
    products, decoded = Counter(), Counter()
    matmul, upcast = FrozenLinear.matmul, partial(counted, decoded, dora_torch.upcast)
    monkeypatch.setattr(dora_torch, "upcast", upcast)
    monkeypatch.setattr(FrozenLinear, "matmul", lambda layer, x, **keys: products.update([layer]) or matmul(layer, x, **keys))
    found, made = {}, []
    with built(config) as training:
        patterns, denoiser = unread(training), training.model.modules["transformer"]
        last = [
            module.base_layer for name, module in denoiser.named_modules()
            if hasattr(module, "base_layer") and any(fnmatchcase(name, pattern) for pattern in patterns)
        ]  # fmt: skip
        ends = "norm.linear", "norm1.linear", "norm1_context.linear"
        modulations = sum(name.endswith(ends) for name, _ in denoiser.named_modules())
        for every in ("selective", True, False):
            checkpoint_every(training, every)
            products.clear(), attended.clear(), decoded.clear()
            found[every] = gradients(training)
            made.append((max(products[layer] for layer in last), attended["calls"], decoded["calls"]))
    (of_selective, once, _), (of_all, twice, decoded_all), (of_none, plain, decoded_once) = made
    assert (of_all, of_selective, of_none) == (*again[:2], 1) and (once, twice) == (plain, again[2] * plain)
    # But for layers whose input needs no gradient: of modulations, and of the first block's queries, keys and values.
    assert (decoded_all - decoded_once == modulations + 6) == (adapter == "lora") and decoded_all > decoded_once
    assert all(torch.equal(found[every][name], found[False][name]) for every in found for name in found[False])


def counted(calls: Counter, function: Callable, *given, **keys):
    calls["calls"] += 1
    return function(*given, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["text_encoder", "norm"])
def test_a_recomputation_keeps_the_products_that_trained_gates_multiply(bench: Workbench, gate: str) -> None:
    adapted = {
        "text_encoder": {"adapter__rules": [{"component": "text_encoder", "match": "*.q_proj"}]},
        "norm": {"adapter__targets": ["transformer_blocks.0.norm1.linear", "single_transformer_blocks.0.norm.linear"]},
    }[gate]
    with built(bench.config("flux", memory__gradient_checkpointing=True, **adapted)) as training:
        recomputed = gradients(training)
        checkpoint_every(training, False)
        plain = gradients(training)
    assert any(".norm" in name or name.startswith("text_encoder.") for name in plain)
    assert all(torch.isfinite(grad).all() and torch.equal(plain[name], grad) for name, grad in recomputed.items())


def test_a_product_that_something_reads_after_all_is_noticed(bench: Workbench, monkeypatch) -> None:
    wrong = dataclasses.replace(flux.FAMILY, memory=dataclasses.replace(flux.FAMILY.memory, unread=("*.ff.net.0.proj",)))
    monkeypatch.setitem(models.FAMILIES, "flux", wrong)
    config = bench.config(
        "flux", memory__gradient_checkpointing=True, model__components={"transformer": {"dtype": "fp8_e4m3"}}
    )
    with built(config) as training:
        result = take_step(training, 1, next(training.updates()))
    assert not result.updated and "the gradient is not finite" in result.refused


@pytest.mark.slow
def test_changed_photos_are_refused_on_resume(bench: Workbench, capsys) -> None:
    photos = bench.tmp / "photos"
    shutil.copytree(PHOTOS, photos)
    tree = bench.tree(data__sources=[{"path": str(photos)}], run__max_steps=3, run__stop_after=1)
    assert run(bench, tree) == 0
    (photos / "00.txt").write_text("another caption")
    assert run(bench, tree, "--resume_from", "auto") == 2
    said = capsys.readouterr().err
    assert "the data are not those of the checkpoint (5 photos then, 5 now):\n       other captions: 0/00.jpg\n" in said
    assert "--resume_from auto --allow data" in said


@pytest.mark.slow
def test_resume_from_an_older_folder_sets_the_later_ones_aside(bench: Workbench) -> None:
    tree = bench.tree(run__max_steps=3, checkpoint__every_steps=1, adapter__targets=FEW)
    assert run(bench, tree) == 0
    whole = metrics_of(bench.tmp / "out")
    root = bench.tmp / "out" / "checkpoints"
    tree["run"]["stop_after"] = 2
    assert run(bench, tree, "--resume_from", str(root / "step-00000001")) == 0
    assert store.steps(root) == [1, 2] and (root / "superseded-step-00000003").is_dir()
    assert metrics_of(bench.tmp / "out") == whole[:2]
    del tree["run"]["stop_after"]
    assert run(bench, tree, "--resume_from", "auto") == 0
    assert metrics_of(bench.tmp / "out") == whole


@pytest.mark.slow
def test_resume_from_a_foreign_folder_spares_the_output_directory(bench: Workbench, capsys) -> None:
    assert run(bench, bench.tree(run__max_steps=2, adapter__targets=FEW)) == 0
    other = bench.tree(run__max_steps=2, run__output_dir=str(bench.tmp / "other"), adapter__targets=FEW)
    assert run(bench, other) == 0
    folder = str(bench.tmp / "out" / "checkpoints" / "step-00000002")
    kept = {p: p.read_bytes() for p in (bench.tmp / "other").rglob("*") if p.is_file()}
    assert run(bench, other, "--resume_from", folder) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert kept == {p: p.read_bytes() for p in (bench.tmp / "other").rglob("*") if p.is_file()}


@pytest.mark.slow
def test_a_start_that_never_saved_is_replaced_by_a_mended_config(bench: Workbench) -> None:
    tree = bench.tree(run__max_steps=2)
    out = bench.tmp / "out"
    out.mkdir()
    (out / "config.toml").write_text(configs.dumps(bench.config(run__seed=99)))
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    (out / "samples" / "step-00000000").mkdir(parents=True)
    (out / "samples" / ".step-00000000.17.0a1b2c3d.tmp").mkdir()
    (out / f".config.toml.{2**22 + 1}.0a1b2c3d.tmp").touch()  # no process has that number
    (out / ".mine.tmp").touch()
    assert run(bench, tree, "--resume_from", "auto") == 0
    assert [entry["step"] for entry in metrics_of(out)] == [1, 2]
    assert not (out / "samples" / "step-00000000").exists()
    assert {path.name for path in out.rglob(".*")} == {".lock", ".mine.tmp"}, "a leftover of the killed start, or not ours"


def test_exclude_that_matches_nothing_is_an_error(bench: Workbench, capsys) -> None:
    tree = bench.tree(model__components={"unet": {"dtype": "fp8_e4m3", "exclude": ["*to_qq"]}})
    assert run(bench, tree) == 2
    assert "model.components.unet.exclude: the pattern '*to_qq' matches no layer" in capsys.readouterr().err


@pytest.mark.slow
def test_excluded_layers_stay_in_16_bit(bench: Workbench) -> None:
    components = {"unet": {"dtype": "fp8_e4m3", "exclude": ["*attn1.to_q"]}}
    with built(bench.config(model__components=components)) as training:
        for name, layer in training.adapter.layers.items():
            stored = layer.get_base_layer().payload_weight.dtype
            assert stored == (torch.bfloat16 if name.endswith("attn1.to_q") else torch.float8_e4m3fn), name


@pytest.mark.slow
def test_resolved_config_names_every_components_dtype(bench: Workbench) -> None:
    import tomllib

    assert run(bench, bench.tree(run__max_steps=1)) == 0
    components = tomllib.loads((bench.tmp / "out" / "config.toml").read_text())["model"]["components"]
    assert {name: c["dtype"] for name, c in components.items()} == {
        "unet": "bf16", "text_encoder": "bf16", "text_encoder_2": "bf16", "vae": "fp32"
    }  # fmt: skip


@pytest.mark.slow
def test_a_saved_adapter_of_another_shape_or_dtype_is_refused(bench: Workbench) -> None:
    with built(bench.config(adapter__targets=["*attn1.to_q"])) as run:
        saved = {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}
        name = next(iter(saved))
        for other, expected in (
            ({name: saved[name].half()}, "torch.float16"),
            ({name: saved[name][:-1]}, r"here torch.float32 \(4, "),
            ({"unet.other": saved[name]}, "unet.other is not part of this run's adapter"),
        ):
            with pytest.raises(UserError, match=expected):
                run.adapter.load_state_dict(saved | other)
        del saved[name]
        with pytest.raises(UserError, match=f"{name} is missing from the saved adapter"):
            run.adapter.load_state_dict(saved)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "encoder"), [("sdxl", "*.q_proj"), ("flux", "*.q")])
def test_the_attention_that_was_asked_for_is_the_denoisers_alone(bench: Workbench, family: str, encoder: str) -> None:
    """In a step, a recomputation, a loss and a sample; text encoders, read live in all, and the VAE keep torch's own."""
    config = bench.config(
        family, step__attention="math", adapter__targets="attention", memory__gradient_checkpointing=True,
        adapter__rules=[{"component": "text_encoder_2", "match": encoder}],
        validation__every_steps=1, validation__prompts=["a bear"], validation__steps=1,
        validation__loss_every_steps=1, data__held_out=2,
    )  # fmt: skip
    with built(config) as training:
        seen: dict[str, Counter[tuple[bool, bool]]] = {}
        for name, module in training.model.modules.items():
            seen[name] = Counter()
            for layer in module.modules():
                if "Attention" in type(layer).__name__:
                    layer.register_forward_pre_hook(
                        lambda *_, at=name: seen[at].update([(attention.only_plain(), recomputing())])
                    )
        take_step(training, 1, next(training.updates()))
        denoiser, recomputed = seen[training.family.denoiser], seen[training.family.denoiser][True, True]
        assert recomputed > 0 and denoiser == {(True, False): recomputed, (True, True): recomputed}
        training.artifacts().draw_samples(Position(0, 3, fresh=True))
        drawn = denoiser[True, False]
        assert drawn > recomputed
        HeldOutLoss.of(training.plan, training.components, training.reader, training.state.evaluating).measure()
        assert denoiser[True, False] > drawn and denoiser.keys() == {(True, False), (True, True)}
        others = {name: found for name, found in seen.items() if name != training.family.denoiser}
        assert others.keys() == {"text_encoder", "text_encoder_2", "vae"}
        assert all(found.keys() == {(False, False)} for found in others.values()), others


@pytest.mark.slow
def test_a_named_attention_is_said_and_auto_is_not(bench: Workbench, capsys) -> None:
    for kind in ("auto", "math"):
        with built(bench.config(step__attention=kind, run__output_dir=str(bench.tmp / kind))):
            pass
        said = capsys.readouterr().out
        assert said.count("attention: math (step.attention = 'math')") == (kind == "math") == ("step.attention" in said)


@pytest.mark.slow
def test_attention_may_change_where_no_bytes_are_promised(bench: Workbench, capsys) -> None:
    """And is said. test_pins.py has the refusal under run.deterministic."""
    tree = bench.tree(run__max_steps=2, run__stop_after=1)
    assert run(bench, tree) == 0
    tree["run"]["stop_after"] = 2
    tree["step"] = {"attention": "math"}
    capsys.readouterr()
    assert run(bench, tree, "--resume_from", "auto") == 0
    assert "than the checkpoint's: attention: torch's own -> math." in capsys.readouterr().out

"""Denoisers of the published sizes with random weights, as a run builds them and as diffusers + PEFT do: what the benchmarks
take steps of."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402

from benchmarks import plain_peft  # noqa: E402
from scripts.make_model import tiny_flux, tiny_sdxl  # noqa: E402
from trainer import kernels, optim, quantization  # noqa: E402
from trainer.adapters import Method, Rates, inject, match_targets  # noqa: E402
from trainer.adapters.kinds import file_kind  # noqa: E402
from trainer.base.memory import checkpoint_blocks, find_blocks  # noqa: E402
from trainer.base.protocols import Kernels  # noqa: E402
from trainer.base.types import Batch, Conditioning, Occurrence  # noqa: E402
from trainer.engine.graphs import Graphs, Recorder  # noqa: E402
from trainer.engine.step import Losses, Step  # noqa: E402
from trainer.models import family_named  # noqa: E402
from trainer.models.base import Markers, Model  # noqa: E402
from trainer.models.building import allocate, build  # noqa: E402
from trainer.models.config_files import PUBLISHED  # noqa: E402
from trainer.models.loading import ModelSource  # noqa: E402
from trainer.plan.storage import Storage  # noqa: E402
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear  # noqa: E402
from trainer.runtime.attention import TORCHS_OWN, Attention  # noqa: E402
from trainer.runtime.compilation import Compiler  # noqa: E402
from trainer.runtime.streaming import Streamer  # noqa: E402

RANK = 16


class Bench:
    """A denoiser in one storage, with its adapter and optimizer: what a run of it holds. base: its frozen tensors by name."""

    def __init__(
        self, source: ModelSource, storage: str, device: torch.device, *, dora: bool = True, chosen: Kernels | None = None,
        recomputed: bool | str = True, optimizer: str = "adamw", compiler: Compiler | None = None,
        attention: Attention = TORCHS_OWN, recorder: Callable[[], Recorder] | None = None,
        base: dict[str, Tensor] | None = None, resident: int | None = None,
    ) -> None:  # fmt: skip
        """chosen: kernels; None for those that a run would choose. recomputed: as memory.gradient_checkpointing. compiler: of
        some. recorder: of CUDA graphs. base: another bench's, to share; None: random weights. resident: how many blocks stay
        on the device, and the others are streamed, with copies of the base; None: all, and none is."""
        family = source.family
        name = family.denoiser
        component = Storage(
            name, FORMATS[storage], torch.bfloat16, sensitive=family.component(name).sensitive, scaled_matmul=False
        )
        module = source.build(name)
        adaptable = [n for n, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        targets = match_targets(
            {name: adaptable}, denoiser=name, targets="attention+mlp", presets=family.adapters.presets, rules=(), rank=RANK,
            alpha=None,
        )  # fmt: skip
        chosen = chosen or kernels.choose("auto", device)
        component.swap(module, kernels=chosen)
        self.streamer = None
        if resident is not None:
            self.streamer = Streamer(family.ordered_blocks(name, module), resident, device)
        if base is None or self.streamer is not None:
            allocate(module, device, self.streamer.at_home() if self.streamer is not None else ())
        if base is None:
            fill(module, device)
        else:
            module.load_state_dict(base, assign=self.streamer is None)
        for layer in module.modules():
            if isinstance(layer, FrozenLayer):
                layer.stored()  # a compiled block does not look for tensors that took another's place
        self.base = dict(module.state_dict())
        family.images.adjust(name, module)
        self.adapter = inject(
            {name: module}, targets, bases=(FrozenLinear, FrozenConv2d), method=Method(file_kind(magnitudes=dora)), seed=0,
        )  # fmt: skip
        module.eval()
        self.adapter.share_inputs(name, family.memory.shared_inputs.get(name, ()))
        blocks = find_blocks(module, family.memory.blocks)
        streamed = {} if self.streamer is None else self.streamer.blocks
        self.adapter.refresh_before({name: module} | {f"{name}.{n}": block for n, block in streamed.items()})
        # A CPU stands for a card here: it would get what is its own.
        attention.give(module, family.memory.attention, torch.device("cuda"), chosen)
        compiled = {n: b for n, b in blocks.items() if compiler and any(fnmatchcase(n, p) for p in family.memory.compiled)}
        checkpoint_blocks(blocks, recomputed, family.memory.unread, family.memory.skipped, compiled)
        if compiler is not None:
            compiler.compile(compiled)
        built = optim.build_optimizer(optimizer, self.adapter.parameter_groups(Rates(lr=1e-4, weight_decay=0.01)))
        with unset_fake_temporarily():  # it reads its noise levels
            self.objective = objective = family.images.objective(
                source.scheduler, Markers(), prediction="auto", zero_terminal_snr="auto", min_snr_gamma=None,
                timesteps="auto", shift="auto", logit_mean=0.0, logit_std=1.0,
            )  # fmt: skip
        self.model = model = Model(
            {name: module}, {name: source.config(name)}, {}, source.scheduler, {name: torch.bfloat16}, device,
            {"objective": objective, "guidance": 1.0},
        )  # fmt: skip
        losses = Losses(
            objective=objective, image_tokens=family.images.image_tokens, seed=0, device=device,
            predict=lambda *inputs: family.images.predict(model, *inputs),
            tokens=lambda texts: {}, encode=lambda tokens: None,
        )  # fmt: skip
        stale, parameters = self.adapter.mark_stale, list(self.adapter.named_parameters().values())
        graphs = None
        if recorder is not None:
            graphs = Graphs(
                losses, parameters, self.adapter, recorder=recorder, say=lambda line: None, attention=attention.used
            )
        self.step = Step(
            losses=losses,
            begin=graphs.begin if graphs else lambda: None,
            graphs=graphs,
            attention=attention.used,
            optimizer=built,
            schedule=optim.build_schedule("constant", built, warmup=0, total_steps=10**6),
            scaler=torch.amp.GradScaler(device.type, enabled=False),
            max_grad_norm=1.0,
            after_update=lambda step: stale() or {},
            sum=lambda *tensors: None,
            training=self.adapter.training(0),
        )  # fmt: skip
        self.layers = [m for m in module.modules() if isinstance(m, FrozenLinear)]
        self.device, self.done = device, 0

    def milliseconds(self, batch: Batch) -> float:
        """Of one step, which ends in a read of its gradient norm."""
        self.done += 1
        synchronize(self.device)
        start = time.perf_counter()
        self.step.run(self.done, [batch], batch.occurrences)
        synchronize(self.device)
        return 1000 * (time.perf_counter() - start)


def fill(module: nn.Module, device: torch.device) -> None:
    """Random weights that keep activations of order 1, made and quantised layer by layer on the device."""
    assert all(name.rpartition(".")[2].startswith("payload_") for name, _ in module.named_buffers())
    with torch.no_grad():
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                parameter.fill_(1.0 if name == "weight" else 0.0)
            if isinstance(layer, FrozenLayer):
                columns = layer.weight_shape[1:].numel()
                dense = torch.randn(layer.weight_shape, dtype=torch.bfloat16, device=device).mul_(columns**-0.5)
                payload = {key: torch.empty_like(tensor, device=device) for key, tensor in layer.payload().items()}
                layer.format.quantize_into(dense, payload)
                for key, tensor in layer.payload().items():
                    tensor.copy_(payload[key])


def batch_of(source: ModelSource, pixels: int, text_tokens: int, count: int = 1) -> Batch:
    config, generator = source.config(source.family.denoiser), torch.Generator().manual_seed(0)
    if source.family.name == "flux":
        channels, width, pooled = (config["in_channels"] // 4, config["joint_attention_dim"], config["pooled_projection_dim"])
    else:
        channels, width = config["in_channels"], config["cross_attention_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    size = torch.tensor([[pixels, pixels]] * count)
    return Batch(
        tuple(Occurrence(0, f"0/{number}.png", 0) for number in range(count)),
        torch.randn(count, channels, pixels // 8, pixels // 8, generator=generator),
        ("",) * count,
        Conditioning(
            torch.randn(count, text_tokens, width, generator=generator).bfloat16(),
            pooled=torch.randn(count, pooled, generator=generator).bfloat16(),
        ),
        original_size=size, crop_top_left=torch.zeros_like(size), target_size=size,
    )  # fmt: skip


def plain_step(
    source: ModelSource, bench: Bench, *, dora: bool, dtype: torch.dtype, recomputed: bool
) -> Callable[[Batch], None]:
    """A step of diffusers + PEFT over the base of a bench whose storage is `dtype`, with the same layers adapted."""
    family, device = source.family, bench.device
    module = build(family.component(family.denoiser), source.config(family.denoiser))
    # A dense payload is the weight itself.
    weights = {name.replace("payload_weight", "weight"): tensor.to(dtype) for name, tensor in bench.base.items()}
    module.load_state_dict(weights, assign=True)
    family.images.adjust(family.denoiser, module)
    names = [name.removeprefix(f"{family.denoiser}.") for name in bench.adapter.layers]
    parameters = plain_peft.adapt(module, names, rank=RANK, dora=dora)
    if recomputed:
        module.enable_gradient_checkpointing()
    module.train()  # else diffusers recomputes nothing
    optimizer = torch.optim.AdamW(parameters, fused=True)
    model = replace(bench.model, modules={family.denoiser: module})
    predict = plain_peft.under_autocast(lambda *inputs: family.images.predict(model, *inputs), device, dtype)

    def step(batch: Batch) -> None:
        def loss() -> Tensor:
            losses = Losses(
                objective=bench.objective, image_tokens=family.images.image_tokens, seed=0, device=device, predict=predict,
                tokens=lambda texts: {}, encode=lambda tokens: None,
            )  # fmt: skip
            return losses(batch).mean()

        plain_peft.update(loss, optimizer, parameters, 1.0)

    return step


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sources(quick: bool, folder: Path) -> dict[str, ModelSource]:
    """The published models' configs; tiny ones with `quick`."""
    roots = {"Flux": ("flux", PUBLISHED / "flux-dev"), "SDXL": ("sdxl", PUBLISHED / "sdxl")}
    found = {}
    for label, (name, root) in roots.items():
        family = family_named(name)
        if quick:
            tiny = tiny_flux("flux-dev", 1000, 1000) if name == "flux" else tiny_sdxl(1000)
            config, scheduler = folder / name / family.denoiser, folder / name / "scheduler"
            config.mkdir(parents=True), scheduler.mkdir()
            (config / "config.json").write_text(json.dumps(tiny[family.denoiser]))
            published = root / "scheduler" / "scheduler_config.json"
            (scheduler / "scheduler_config.json").write_text(published.read_text())
            root = folder / name
        found[label] = ModelSource(family, root, quantization.recognise)
    return found

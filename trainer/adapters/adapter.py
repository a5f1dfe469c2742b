"""The trainable part of a run: the adapted layers, their parameters, and the operations on all of them at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from trainer.adapters.kinds import AdapterKind
from trainer.adapters.targets import Rates, Rule, Target, grouped, with_rates
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress

ADAPTER_NAME = "default"


class Adapter:
    """The trainable part of a run: every adapted layer by its full name ("unet.down_blocks...to_q")."""

    def __init__(self, layers: Mapping, targets: Mapping[str, Target], *, kind: AdapterKind, rslora: bool) -> None:
        self.layers, self.targets, self.kind, self.rslora = dict(layers), dict(targets), kind, rslora
        self.together: dict[str, list] = {}  # layers refreshed together, by the owner whose forward does it

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """fp32 parameters as LAYER.lora_A.weight, sorted by layer; within a layer in the order of `AdapterKind.shapes`."""
        modules = {name: layer.trained(ADAPTER_NAME) for name, layer in self.layers.items()}
        return {f"{name}.{end}": values.weight for name, by_end in modules.items() for end, values in by_end.items()}

    def parameter_groups(self, rates: Rates) -> list[dict[str, object]]:
        """Optimizer groups {"lr", "weight_decay", "params", "magnitudes"}. Magnitudes have groups of their own, never
        decayed; so have layers with a `stop_step`, whose groups have that key too."""
        parameters = self.named_parameters()
        return [
            {"lr": rate, "weight_decay": decay, "params": [parameters[name] for name in names], "magnitudes": magnitude}
            | ({} if stop is None else {"stop_step": stop})
            for (rate, decay, magnitude, stop), names in self.groups(rates).items()
        ]

    def groups(
        self, rates: Rates, rules: Sequence[Rule] | None = None
    ) -> dict[tuple[float, float, bool, int | None], list[str]]:
        """Parameter names by (rate, decay, is a magnitude, stop_step). rules: replace this run's."""
        targets = self.targets
        if rules is not None:
            targets = dict(zip(targets, with_rates(targets.values(), rules), strict=True))
        return grouped(self.named_parameters(), targets, rates)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, fp32: the checkpoint's piece "adapter"."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in. Raises UserError if a name, shape or dtype differs."""
        parameters = self.named_parameters()
        if unmatched := sorted(state.keys() ^ parameters.keys()):
            name = unmatched[0]
            problem = "is missing from the saved adapter" if name in parameters else "is not part of this run's adapter"
            raise UserError(f"the saved adapter does not fit this run: {name} {problem}")
        for name, parameter in parameters.items():
            saved = state[name]
            if (parameter.shape, parameter.dtype) != (saved.shape, saved.dtype):
                raise UserError(
                    f"the saved adapter does not fit this run: {name} is {saved.dtype} {tuple(saved.shape)}, "
                    f"here {parameter.dtype} {tuple(parameter.shape)}"
                )
            parameter.copy_(saved)
        self.mark_stale()

    def mark_stale(self) -> None:
        """Have every layer recompute what it derives from its parameters. Call it after each change of a parameter."""
        for layer in self.layers.values():
            layer.mark_stale()

    def refresh(self, advance: Advance = no_progress) -> None:
        """Recompute now what layers with resident base weights derive from their parameters. advance: counts layers."""
        from trainer.adapters.layers import refresh  # loads PEFT, which takes a second: not needed to read a config

        for layer in self.layers.values():
            refresh([layer])
            advance(1)

    def refreshed(self) -> Callable[[], None]:
        """Refresh all layers as the owners' forwards do. Returns a function that gives them these very tensors back."""
        from trainer.adapters.layers import refresh

        for layers in self.together.values():
            refresh(layers)
        restores = [layer.snapshot() for layer in self.layers.values()]

        def restore_all() -> None:
            for restore in restores:
                restore()

        return restore_all

    def share_inputs(self, component: str, groups: Sequence[Sequence[str]]) -> None:
        """Let Linears of `component` that are called with the same tensor read it once.

        groups: endings of layer names; adapted layers of one group that differ in nothing else share. Adapters with dropout
        do not: each layer draws its own mask.
        """
        from trainer.adapters.layers import SharedInput

        for endings in groups if self.kind.factors is None else ():
            sharing: dict[str, list] = {}
            for name, layer in self.layers.items():
                ending = next((e for e in endings if name.startswith(f"{component}.") and name.endswith(f".{e}")), None)
                if ending is not None and len(layer.get_base_layer().weight_shape) == 2:
                    sharing.setdefault(name.removesuffix(ending), []).append(layer)
            for layers in sharing.values():
                if len(layers) > 1 and len({layer.get_base_layer().compute_dtype for layer in layers}) == 1:
                    SharedInput(layers)

    def refresh_before(self, owners: Mapping[str, nn.Module]) -> None:
        """Have each owner's forward first refresh its stale adapted layers together, but for disabled and merged ones.

        owners: modules by full name: "unet", and its blocks that are streamed. A layer belongs to the innermost owner that
        contains it: there the base weights are resident, and the hook runs outside of what gradient checkpointing repeats.
        """
        from trainer.adapters.layers import refresh

        for name, layer in self.layers.items():
            owner = max((owner for owner in owners if name.startswith(f"{owner}.")), key=len)
            self.together.setdefault(owner, []).append(layer)
        for owner, layers in self.together.items():

            def before(module, args, layers=layers) -> None:
                refresh(layer for layer in layers if not (layer.disable_adapters or layer.merged_adapters))

            owners[owner].register_forward_pre_hook(before)

    @contextmanager
    def at_strength(self, strength: float) -> Iterator[None]:
        """A block in which every adapted layer gives base + strength * (adapted - base); 0 is the frozen base."""
        for layer in self.layers.values():
            layer.strength = strength
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.strength = 1.0

    def training(
        self, seed: int, *, rank_dropout: float = 0.0, module_dropout: float = 0.0
    ) -> Callable[[int, int], AbstractContextManager[None]]:
        """(step, micro-batch) -> a context with the adapter as that step trains it.

        Dropouts are on, seeded by (seed, step, micro-batch), and rank and module dropout by the layer too. Layers past their
        `stop_step` get no gradient any more.
        """
        thins = bool(rank_dropout or module_dropout)
        dropping = {name: layer for name, layer in self.layers.items() if thins or layer.dropout is not None}
        ranks = {name: self.targets[name].rank for name in dropping} if thins else {}
        # One tensor for all layers: one copy to the device, and the same memory each time, which a CUDA graph reads again.
        device = next((next(iter(layer.trained(ADAPTER_NAME).values())).weight.device for layer in dropping.values()), None)
        all_rows = torch.empty(sum(ranks.values()), device=device)
        rows = dict(zip(ranks, all_rows.split([*ranks.values()]), strict=True)) if thins else {}
        stops = {name: stop for name, target in self.targets.items() if (stop := target.stop_step) is not None}

        @contextmanager
        def context(step: int, micro_batch: int) -> Iterator[None]:
            for name in [name for name, stop in stops.items() if step > stop]:
                self.layers[name].requires_grad_(False)
                del stops[name]
            if not dropping:
                yield
                return
            torch.manual_seed(draws.generator(seed, "dropout", step, micro_batch).initial_seed())
            if thins:
                row_factors = drawn_rows(
                    ranks, rank_dropout=rank_dropout, module_dropout=module_dropout, seed=seed, step=step,
                    micro_batch=micro_batch,
                )  # fmt: skip
                all_rows.copy_(torch.cat([*row_factors.values()]))
            for name, layer in dropping.items():
                layer.train()
                layer.current.rows = rows.get(name)
            try:
                yield
            finally:
                for layer in dropping.values():
                    layer.eval()
                    layer.current.rows = None

        return context

    @torch.no_grad()
    def limit_norms(self, limit: float, step: int) -> int:
        """Scale A and B of the layers that this step trains alike where ||s B A|| (Frobenius) exceeds `limit`, so that it
        equals it: kohya's --scale_weight_norms. Returns how many were scaled; derived values are stale then.

        The norm is computed without B A: ||B A||^2 = sum of (B^T B) * (A A^T).
        """
        stops = {name: target.stop_step for name, target in self.targets.items()}
        tensors, ratios, above = [], [], []
        # By the step alone: a process without a micro-batch has to decide as the others do.
        for layer in [layer for name, layer in self.layers.items() if (stop := stops[name]) is None or step <= stop]:
            adapter, a, b, *_ = layer.active()
            a_RK, b_NR = a.weight.flatten(1), b.weight.flatten(1)
            norm = layer.scaling[adapter] * (b_NR.t() @ b_NR).mul_(a_RK @ a_RK.t()).sum().clamp_min(0).sqrt()
            is_above = norm > limit
            ratio = torch.where(is_above, (limit / norm).sqrt(), 1.0)  # times 1 is no change of any bit
            tensors += [a.weight, b.weight]
            ratios += [ratio, ratio]
            above.append(is_above)
        if not tensors:
            return 0
        torch._foreach_mul_(tensors, ratios)
        return int(torch.stack(above).sum())


def drawn_rows(
    ranks: Mapping[str, int], *, rank_dropout: float, module_dropout: float, seed: int, step: int, micro_batch: int
) -> dict[str, torch.Tensor]:
    """Factors for the rows of each layer's A in this micro-batch: fp32 [R], on the CPU. ranks: by layer.

    A row is dropped with probability `rank_dropout`, a layer with `module_dropout`, each by a draw of its own. The others are
    divided by their probability to remain, so that the expected update is the whole one.
    """
    rows = {}
    for layer, rank in ranks.items():
        u_module, *u_rank = draws.uniforms(1 + rank, seed, "layer_dropout", step, micro_batch, layer)
        remains = torch.tensor(u_rank, dtype=torch.float64) >= rank_dropout
        share = (1 - rank_dropout) * (1 - module_dropout)
        rows[layer] = (remains.double() * (u_module >= module_dropout) / share).float()
    return rows

"""The trainable part of a run: the adapted layers, their parameters, and what is done with all of them at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from trainer.adapters.kinds import AdapterKind
from trainer.adapters.limits import drawn_rows, limit_norms
from trainer.adapters.targets import Rates, Rule, Target, grouped, with_rates
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress

ADAPTER_NAME = "default"


class Adapter:
    """The trainable part of a run: every adapted layer by its full name ("unet.down_blocks...to_q")."""

    def __init__(self, layers: Mapping, targets: Mapping[str, Target], *, kind: AdapterKind, rslora: bool) -> None:
        self.layers, self.targets, self.kind, self.rslora = dict(layers), dict(targets), kind, rslora
        self.together: dict[str, list] = {}  # layers that are refreshed together, by the owner whose forward does it

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """fp32 parameters, as LAYER.lora_A.weight, sorted by layer; a layer's in the order of `AdapterKind.shapes`."""
        layers = self.layers.items()
        return {f"{name}.{end}": held.weight for name, layer in layers for end, held in layer.trained(ADAPTER_NAME).items()}

    def parameter_groups(self, rates: Rates) -> list[dict[str, object]]:
        """Optimizer groups, {"lr", "weight_decay", "params", "magnitudes"}: magnitudes apart, and never decayed. Layers with
        a `stop_step` are apart, too, and their groups have that key."""
        parameters = self.named_parameters()
        return [
            {"lr": rate, "weight_decay": decay, "params": [parameters[name] for name in names], "magnitudes": magnitude}
            | ({} if stop is None else {"stop_step": stop})
            for (rate, decay, magnitude, stop), names in self.groups(rates).items()
        ]

    def groups(
        self, rates: Rates, rules: Sequence[Rule] | None = None
    ) -> dict[tuple[float, float, bool, int | None], list[str]]:
        """The parameters' names by (rate, decay, whether they are magnitudes, stop_step). rules: others than this run's."""
        targets = self.targets
        if rules is not None:
            targets = dict(zip(targets, with_rates(targets.values(), rules), strict=True))
        return grouped(self.named_parameters(), targets, rates)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, fp32: the piece "adapter" of a checkpoint."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in. Raises UserError where names or shapes differ."""
        mine = self.named_parameters()
        odd = sorted(state.keys() ^ mine.keys())
        if odd:
            where = "is missing from the saved adapter" if odd[0] in mine else "is not part of this run's adapter"
            raise UserError(f"the saved adapter does not fit this run: {odd[0]} {where}")
        for name, parameter in mine.items():
            saved = state[name]
            if (parameter.shape, parameter.dtype) != (saved.shape, saved.dtype):
                raise UserError(
                    f"the saved adapter does not fit this run: {name} is {saved.dtype} {tuple(saved.shape)}, "
                    f"here {parameter.dtype} {tuple(parameter.shape)}"
                )
            parameter.copy_(saved)
        self.mark_stale()

    def mark_stale(self) -> None:
        """Due after every change of the parameters: what follows from them is made anew before its next use."""
        for layer in self.layers.values():
            layer.mark_stale()

    def refresh(self, advance: Advance = no_progress) -> None:
        """Make now, of resident base weights, what follows from the parameters: the next forward finds it fresh."""
        from trainer.adapters.layers import refresh  # it loads PEFT, which takes a second: not to read a config

        for layer in self.layers.values():
            refresh([layer])
            advance(1)

    def refreshed(self) -> Callable[[], None]:
        """Make what follows from the parameters, as owners' forwards do; returns what gives all layers that memory back."""
        from trainer.adapters.layers import refresh

        for layers in self.together.values():
            refresh(layers)
        made = [layer.made() for layer in self.layers.values()]
        joined = {layer.shared: layer.shared.a_all for layer in self.layers.values() if layer.shared is not None}

        def put_back() -> None:
            for layer in made:
                layer()
            for shared, a_all in joined.items():
                shared.a_all = a_all

        return put_back

    def share_inputs(self, component: str, groups: Sequence[Sequence[str]]) -> None:
        """Let Linears of `component` that are called with one tensor read it once.

        groups: endings of layer names; adapted layers of one group that differ in nothing else share. Adapters with dropout
        do not: each layer draws its own mask.
        """
        from trainer.adapters.layers import SharedInput  # it loads PEFT, which takes a second: not to read a config

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
        """Have the forward of each owner first refresh its stale adapted layers, together; those that are off are left.

        owners: modules by full name, as "unet", and those of its blocks that are streamed; a layer belongs to the innermost
        one that contains it. There the base weights are resident, and the hook runs outside of what gradient checkpointing
        repeats.
        """
        from trainer.adapters.layers import refresh

        for name, layer in self.layers.items():
            inside = [owner for owner in owners if name.startswith(f"{owner}.")]
            self.together.setdefault(max(inside, key=len), []).append(layer)
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
        """(step, micro-batch) -> a context in which the adapter is as that step trains it.

        Dropouts are on, seeded by (seed, step, micro-batch), and by the layer those of ranks and modules. Layers whose
        `stop_step` is behind get no gradient any more.
        """
        thin = bool(rank_dropout or module_dropout)
        dropping = {name: layer for name, layer in self.layers.items() if thin or layer.dropout is not None}
        ranks = {name: self.targets[name].rank for name in dropping} if thin else {}
        # In the same memory each time, which a CUDA graph reads again, and in one copy to the device.
        device = next((next(iter(layer.trained(ADAPTER_NAME).values())).weight.device for layer in dropping.values()), None)
        all_rows = torch.empty(sum(ranks.values()), device=device)
        rows = dict(zip(ranks, all_rows.split([*ranks.values()]), strict=True)) if thin else {}
        stops = {name: stop for name, target in self.targets.items() if (stop := target.stop_step) is not None}

        @contextmanager
        def within(step: int, micro_batch: int) -> Iterator[None]:
            for name in [name for name, stop in stops.items() if step > stop]:
                self.layers[name].requires_grad_(False)
                del stops[name]
            if not dropping:
                yield
                return
            torch.manual_seed(draws.generator(seed, "dropout", step, micro_batch).initial_seed())
            if thin:
                drawn = drawn_rows(
                    ranks, rank_dropout=rank_dropout, module_dropout=module_dropout, seed=seed, step=step,
                    micro_batch=micro_batch,
                )  # fmt: skip
                all_rows.copy_(torch.cat([*drawn.values()]))
            for name, layer in dropping.items():
                layer.train()
                layer.now.rows = rows.get(name)
            try:
                yield
            finally:
                for layer in dropping.values():
                    layer.eval()
                    layer.now.rows = None

        return within

    def limit_norms(self, limit: float, step: int) -> int:
        """Scale down the layers that this step trains and whose update is larger than `limit`; returns how many. What follows
        from the parameters is stale then."""
        stops = {name: target.stop_step for name, target in self.targets.items()}
        # By the step alone: a process without a micro-batch has to decide as the others do.
        trained = [layer for name, layer in self.layers.items() if (stop := stops[name]) is None or step <= stop]
        return int(limit_norms(trained, limit))

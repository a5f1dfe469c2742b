"""adapter.init_from: start from the weights of another adapter, with a fresh optimizer. They are copied in after the usual
initialisation, so layers and ranks that they lack start as in any run: A random, B zero.

    LoRA      s B A is the file's: B is multiplied by the quotient of the scales, 1 if they agree
    DoRA      m gives the file's g (W + s B A) over this run's W, by what the file's magnitudes mean (norms.py, inverted)
    LoRA file in a DoRA run    m = ||W + s B A||: g = 1, so that the first step computes what the file does
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainer.adapters import ADAPTER_NAME, Adapter
from trainer.adapters.norms import Norms, RowNorms, magnitude
from trainer.adapters.peft_config import WEIGHTS, is_peft_folder
from trainer.adapters.portable import Factors, Portable, is_finite, recipe, shrunk
from trainer.base.account import Account
from trainer.base.errors import UserError
from trainer.base.files import hash_file
from trainer.kernels.dora_torch import TINY


@dataclass
class Start:
    """A piece of the checkpoint: the file that a run started from, and the initial weights. A resumed run needs no file.

    path: adapter.init_from; "" if it is not set. sha256: of the file, or of the checkpoint's adapter.safetensors; "" if it is
    missing. portable: the adapter read; None in a resumed run. shrinkage: relative change of layers whose rank was
    reduced. weights: Adapter.state_dict before the first step, on the CPU. account: what was assumed or left out.
    """

    path: str = ""
    sha256: str = ""
    portable: Portable | None = None
    shrinkage: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] | None = None
    account: Account = field(default_factory=Account)

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path).name

    def lineage(self) -> dict[str, str]:
        """The initial file as {"file", "sha256"}; empty without one."""
        return {"file": self.name, "sha256": self.sha256} if self.path else {}

    def state_dict(self) -> Mapping[str, Any]:
        """The lineage and the initial weights."""
        return self.lineage() | (self.weights or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the piece. Raises UserError if adapter.init_from is another file now."""
        self.weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        saved_digest = str(state["sha256"])
        if self.sha256 and self.sha256 != saved_digest:
            digests = f"(SHA-256 {self.sha256[:12]}, then {saved_digest[:12]})"
            other = f"adapter.init_from = {self.path!r} is not the file that the run started from {digests}"
            raise UserError(f"{other}; restore it, or remove it: the checkpoint has its weights")
        self.path, self.sha256 = str(state["file"]), saved_digest

    def apply(self, adapter: Adapter, norms: Norms, say: Callable[[str], object]) -> None:
        """Copy the file into the adapter, report it, and keep the initial `weights`. Raises UserError for values that are not
        finite, and if restored weights do not fit the adapter."""
        if self.portable is not None:
            self._put_in(self.portable, adapter, norms, say)
        if not self.path:
            return
        current = adapter.state_dict()
        if self.weights is None:
            self.weights = {name: tensor.to("cpu", copy=True) for name, tensor in current.items()}
        for name in sorted(current.keys() | self.weights.keys()):
            pair = self.weights.get(name), current.get(name)
            kinds = [(t.dtype, tuple(t.shape)) if t is not None else None for t in pair]
            if kinds[0] != kinds[1]:
                raise UserError(f"the weights that the run started from do not fit it: {name} was {kinds[0]}, is {kinds[1]}")

    def _put_in(self, portable: Portable, adapter: Adapter, norms: Norms, say: Callable[[str], object]) -> None:
        for name, factors in portable.layers.items():
            for kind, tensor in factors.tensors().items():
                if not is_finite(tensor.make()):
                    raise UserError(f"adapter.init_from = {self.path!r}: {kind} of {name} is not finite; take another file")
            self._copy(adapter, name, factors)
        adapter.mark_stale()
        if adapter.kind.magnitudes:
            norms_by_layer = norms.now()
            for name, factors in portable.layers.items():
                self._set_magnitude(adapter, name, factors, norms_by_layer[name])
            adapter.mark_stale()
        text = f"starting from {self.path}: {len(portable.layers)} layers"
        if fresh := len(adapter.layers) - len(portable.layers):
            text += f"; {fresh} others are not in it and start anew"
        if losses := self.shrinkage:
            worst = max(losses, key=lambda name: losses[name])
            text += f"; {len(losses)} were shrunk, losing {losses[worst]:.2%} of their change at most ({worst})"
        say(text)

    @torch.no_grad()
    def _copy(self, adapter: Adapter, name: str, factors: Factors) -> None:
        target, layer = adapter.targets[name], adapter.layers[name]
        if factors.matrices:
            ratio = factors.scaling / layer.scaling[ADAPTER_NAME]
            for end, module in layer.trained(ADAPTER_NAME).items():
                module.weight.copy_(factors.matrices[end].make().float())
            next(iter(layer.trained(ADAPTER_NAME).values())).weight.mul_(ratio)
            return
        if factors.rank > target.rank:
            a, b = (recipe(tensor.make().float()) for tensor in (factors.a, factors.b))
            factors, self.shrinkage[name] = shrunk(replace(factors, a=a, b=b), target.rank)
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        ratio = factors.scaling / target.scaling(adapter.rslora)
        a[: factors.rank] = factors.a.make().float()
        b.zero_()
        b[:, : factors.rank] = factors.b.make().float() * ratio

    @torch.no_grad()
    def _set_magnitude(self, adapter: Adapter, name: str, factors: Factors, norms: RowNorms) -> None:
        layer = adapter.layers[name]
        m, c = layer.lora_magnitude_vector[ADAPTER_NAME].weight, norms.adapted
        assert self.portable is not None and c is not None
        if factors.magnitude is None:
            m.copy_(c)
            return
        values = factors.magnitude.make().float()
        if self.portable.meaning == "comfyui_released":  # g ||W16||
            m.copy_(torch.where(norms.reader > 0, values * c / norms.reader.clamp_min(TINY), values))
            return
        a, b = (factor.cpu() for factor in layer.factors(ADAPTER_NAME))
        whole = magnitude(c, a, b, adapter.targets[name].scaling(adapter.rslora), norms)  # of g = 1
        m.copy_(values if norms.original is None else torch.where(whole > 0, values * c / whole.clamp_min(TINY), values))


def open_start(path: str | None, read: Callable[[], tuple[Portable, Account]], *, resumed: bool = False) -> Start:
    """The start of a run. path: adapter.init_from. read: returns the adapter at `path`, checked against the plan, and its
    account. resumed: the file is not read, and may be missing."""
    if path is None:
        return Start()
    place = Path(path)
    file = place / (WEIGHTS if is_peft_folder(place) else "adapter.safetensors") if place.is_dir() else place
    if resumed:
        return Start(path, hash_file(file) if file.is_file() else "")
    portable, account = read()
    return Start(path, hash_file(file), portable, account=account)

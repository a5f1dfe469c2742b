"""adapter.init_from: a run that starts from the weights of another adapter, with a fresh optimizer. They come in after the
run's own first draw, so what they do not have (layers, ranks beyond their own) starts as in any run: A drawn, B zero.

    LoRA      s B A is the file's: B is multiplied by the quotient of the scales, which is 1 where they agree
    DoRA      m gives the file's g (W + s B A) over this run's W, by what the file's magnitudes mean (norms.py, inverted)
    LoRA file in a DoRA run    m = ||W + s B A||: g = 1, so that the first step sees what the file gives
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
from trainer.checkpoint.pieces import Pieces
from trainer.kernels.dora_torch import TINY


@dataclass
class Start:
    """A piece of the checkpoint: which file a run started from, and with which weights. A resumed run needs the file no more.

    path: as adapter.init_from gives it; "" in a run that starts anew. sha256: of the file, of a checkpoint its
    adapter.safetensors; "" where it is gone. portable: what was read; None in a resumed run. weights: as Adapter.state_dict
    had them before the first step, on the CPU. account: what was assumed of the file, and left out of it.
    """

    path: str = ""
    sha256: str = ""
    portable: Portable | None = None
    lost: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] | None = None
    account: Account = field(default_factory=Account)

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path).name

    def lineage(self) -> dict[str, str]:
        """The file that it started from, {"file", "sha256"}; empty where it started anew."""
        return {"file": self.name, "sha256": self.sha256} if self.path else {}

    def enter(self, pieces: Pieces) -> None:
        """Enter the piece "start" of a run that has one."""
        if self.path:
            pieces.enter("start", self)

    def state_dict(self) -> Mapping[str, Any]:
        """The lineage, and the weights that the run began with."""
        return self.lineage() | (self.weights or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where another file lies there now."""
        self.weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        then = str(state["sha256"])
        if self.sha256 and self.sha256 != then:
            digests = f"(SHA-256 {self.sha256[:12]}, then {then[:12]})"
            other = f"adapter.init_from = {self.path!r} is not the file that the run started from {digests}"
            raise UserError(f"{other}; restore it, or remove it: the checkpoint has its weights")
        self.path, self.sha256 = str(state["file"]), then

    def apply(self, adapter: Adapter, norms: Norms, say: Callable[[str], object]) -> None:
        """Put what was read into the adapter, say what came in, and keep it as `weights`. Raises UserError for a value that
        is not finite, and for kept weights that are of another adapter."""
        if self.portable is not None:
            self._put_in(self.portable, adapter, norms, say)
        if not self.path:
            return
        now = adapter.state_dict()
        if self.weights is None:
            self.weights = {name: tensor.to("cpu", copy=True) for name, tensor in now.items()}
        for name in sorted(now.keys() | self.weights.keys()):
            kinds = [(t.dtype, tuple(t.shape)) if t is not None else None for t in (self.weights.get(name), now.get(name))]
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
            now = norms.now()
            for name, factors in portable.layers.items():
                self._set_magnitude(adapter, name, factors, now[name])
            adapter.mark_stale()
        text = f"starting from {self.path}: {len(portable.layers)} layers"
        if fresh := len(adapter.layers) - len(portable.layers):
            text += f"; {fresh} others are not in it and start anew"
        if self.lost:
            worst = max(self.lost, key=lambda name: self.lost[name])
            text += f"; {len(self.lost)} were shrunk, losing {self.lost[worst]:.2%} of their change at most ({worst})"
        say(text)

    @torch.no_grad()
    def _copy(self, adapter: Adapter, name: str, factors: Factors) -> None:
        target, layer = adapter.targets[name], adapter.layers[name]
        if factors.matrices:
            ratio = factors.scaling / layer.scaling[ADAPTER_NAME]
            for end, held in layer.trained(ADAPTER_NAME).items():
                held.weight.copy_(factors.matrices[end].make().float())
            next(iter(layer.trained(ADAPTER_NAME).values())).weight.mul_(ratio)
            return
        if factors.rank > target.rank:
            a, b = (recipe(tensor.make().float()) for tensor in (factors.a, factors.b))
            factors, self.lost[name] = shrunk(replace(factors, a=a, b=b), target.rank)
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
    """The start of a run. path: adapter.init_from. read: gives the adapter that lies there, checked against the plan, and
    what was assumed of it. resumed: it is not read, and need not be there."""
    if path is None:
        return Start()
    place = Path(path)
    held = place / (WEIGHTS if is_peft_folder(place) else "adapter.safetensors") if place.is_dir() else place
    if resumed:
        return Start(path, hash_file(held) if held.is_file() else "")
    portable, account = read()
    return Start(path, hash_file(held), portable, account=account)

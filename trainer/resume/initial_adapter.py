"""adapter.init_from: a run that starts from the weights of another adapter, with a fresh optimizer.

The file or checkpoint is checked against the plan by its header. Its weights come in after the run's own first draw, so what
it does not have (layers, ranks beyond its own) starts as in any run: A drawn, B zero.

    LoRA      s B A is the file's: B is multiplied by the quotient of the scales, which is 1 where they agree
    DoRA      m gives the file's g (W + s B A) over this run's W, by what the file's magnitudes mean (norms.py, inverted)
    LoRA file in a DoRA run    m = ||W + s B A||: g = 1, so that the first step sees what the file gives
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from trainer.adapters import ADAPTER_NAME, Adapter
from trainer.adapters.keys import some
from trainer.adapters.kinds import KINDS, kind_named
from trainer.adapters.norms import Norms, RowNorms, magnitude
from trainer.adapters.peft_config import WEIGHTS, is_peft_folder
from trainer.adapters.portable import Factors, Portable, is_finite, recipe
from trainer.adapters.ranks import shrunk
from trainer.base.account import Account, Heading
from trainer.base.errors import UserError
from trainer.base.files import hash_file
from trainer.checkpoint.pieces import Pieces
from trainer.kernels.dora_torch import TINY
from trainer.plan.run_plan import RunPlan
from trainer.resume.adapter_file import NamedModel, open_adapter, open_checkpoint

READ_BEFORE = "the model reads the encoder before these layers, so they change no picture, and nothing trains them"
UNTRAINED = "their B is zero, so they change nothing, and this run does not adapt them"


@dataclass
class Start:
    """A piece of the checkpoint: which file a run started from, and with which weights. A resumed run needs the file no more.

    path: as adapter.init_from gives it; "" in a run that starts anew. sha256: of the file, of a checkpoint its
    adapter.safetensors; "" where it is gone. portable: what was read; None in a run that is resumed.
    weights: as Adapter.state_dict had them before the first step, on the CPU; what training changed is told from there.
    account: what was assumed of the file, and left out of it.
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
            factors, self.lost[name] = shrunk(_in_fp32(factors), target.rank)
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        ratio = factors.scaling / target.scaling(adapter.rslora)
        made = factors.b.make().float()
        a[: factors.rank] = factors.a.make().float()
        b.zero_()
        b[:, : factors.rank] = made if ratio == 1 else made * ratio

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


def _in_fp32(factors: Factors) -> Factors:
    a, b = (recipe(tensor.make().float()) for tensor in (factors.a, factors.b))
    return replace(factors, a=a, b=b)


def open_start(plan: RunPlan, *, resumed: bool = False) -> Start:
    """What adapter.init_from names, checked against the plan. Reads headers and scales. resumed: it is not read, and need not
    be there. Raises UserError for what does not fit."""
    path = plan.config.adapter.init_from
    if path is None:
        return Start()
    place = Path(path)
    peft = is_peft_folder(place)
    held = place / (WEIGHTS if peft else "adapter.safetensors") if place.is_dir() else place
    if resumed:
        return Start(path, hash_file(held) if held.is_file() else "")
    key = f"adapter.init_from = {path!r}"
    if not place.exists():
        raise UserError(f"{key} does not exist; give an adapter file, a folder that PEFT saved, or a checkpoint's folder")
    try:
        if place.is_dir() and not peft:
            portable, account = open_checkpoint(place).portable("magnitude"), Account()
        else:
            model = NamedModel(plan.model.family, plan.config.model.path, plan.model.source.config, plan.model.source)
            opened = open_adapter(place, [model])
            portable, account = opened.portable, opened.account
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    portable = with_effect(portable, plan, account)
    check_fits(key, portable, plan)
    return Start(path, hash_file(held), portable, account=account)


def with_effect(portable: Portable, plan: RunPlan, account: Account) -> Portable:
    """The adapter without layers that this run does not adapt and that change nothing: they are entered in the account. Reads
    B of the layers that are not adapted."""
    family, adapted = plan.model.family, {f"{target.component}.{target.name}" for target in plan.model.targets}
    unread = {name: family.adapters.no_gradient(name, plan.model.source.config(name)) for name in family.text_encoders}
    effective = {}
    for name, factors in portable.layers.items():
        component, _, layer = name.partition(".")
        dead = any(fnmatchcase(layer, pattern) for pattern in unread.get(component, ()))
        if name in adapted or not (dead or factors.magnitude is None and not factors.b.make().any()):
            effective[name] = factors
        else:
            account.add(Heading.LEFT_OUT, READ_BEFORE if dead else UNTRAINED, [name], noun="layer")
    return portable.with_layers(effective)


def check_fits(key: str, portable: Portable, plan: RunPlan) -> None:
    """Raises UserError where an adapter cannot be put into a run's. key: how the message names it."""
    kind, resize = kind_named(plan.config.adapter.type, vars(plan.config.adapter)), plan.config.adapter.init_resize
    targets = {f"{target.component}.{target.name}": target for target in plan.model.targets}
    if beyond := [name for name in portable.layers if name not in targets]:
        lost = f"layers that this run does not adapt, and they would be lost: {some(beyond)}"
        raise UserError(f"{key} has {lost}; take them with {' and '.join(_lines_for(beyond, portable, plan))}")
    if not portable.layers:
        raise UserError(f"{key} has no layer that changes anything in this run; leave it out, or take another file")
    as_lora = "make a LoRA of it: python scripts/adapter.py convert --to lora"
    if (start_kind := portable.kind).name not in kind.starts_from:
        taken = " or ".join(f"adapter.type = {each.name!r}" for each in KINDS.values() if start_kind.name in each.starts_from)
        remedy = f"{taken}, or {as_lora}" if "lora" in kind.starts_from else taken
        raise UserError(f"{key} is a {start_kind.word} and adapter.type = {kind.name!r}; set {remedy}")
    for name, factors in portable.layers.items():
        target = targets[name]
        shape = plan.shapes[target.component, target.name]
        if factors.weight_shape != tuple(shape):
            sizes = f"{list(factors.weight_shape)}, the model's is {list(shape)}"
            raise UserError(f"{key}: {name} is for a weight {sizes}; it was trained over another model")
        if kind.form is not None:
            wanted = kind.shapes(shape, target.rank)
            if (held := {end: tensor.shape for end, tensor in factors.matrices.items()}) != wanted:
                keys = ", ".join(f"adapter.{option}" for option in ("rank", *kind.form.options))
                raise UserError(f"{key}: {name} has {held}, this run's has {wanted}; set {keys} as it was made with")
            continue
        if factors.axis == "input" and factors.magnitude is not None:
            axes = f"the magnitude of {name} is of the input axis, here it is of the output axis"
            raise UserError(f"{key}: {axes}; {as_lora}")
        if factors.rank != target.rank and not resize:
            ranks = f"{key}: {name} has rank {factors.rank}, this run {target.rank}; set adapter.rank (or a rule's) to it"
            way = "adapter.init_resize = true to grow it without a change, or to shrink it to the nearest of that rank"
            raise UserError(f"{ranks}, or {way}")


def _lines_for(beyond: list[str], portable: Portable, plan: RunPlan) -> list[str]:
    """The lines of the config that adapt the layers `beyond`, by full name, beside the others of the file."""
    names, family = dict.fromkeys(name.partition(".")[0] for name in beyond), plan.model.family
    layers = [target.name for target in portable.targets if target.component == family.denoiser]
    fit = {
        preset: all(any(fnmatchcase(n, p) for p in globs) for n in layers)
        for preset, globs in family.adapters.presets.items()
    }
    wide = next((preset for preset, fits in fit.items() if fits), "all")
    rule = '[[adapter.rules]] component = "{}", match = "*" (a line each)'
    return [f'adapter.targets = "{wide}"' if name == family.denoiser else rule.format(name) for name in names]

"""What must not differ between the processes of a run (docs/processes.md). Each reads a config, photos and a model of its
own, perhaps stale ones. So what a checkpoint is made of is compared three times: the config as the processes meet, data and
files before a weight is read, all tensors before step 1."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any

import torch

from trainer import __version__
from trainer import config as configs
from trainer.base.console import shortlist
from trainer.base.errors import UserError, shown
from trainer.base.tensorfile import tensor_sha256
from trainer.checkpoint.state import Pieces
from trainer.config import Config
from trainer.data import identity
from trainer.plan.run_plan import RunPlan
from trainer.resume.pins import PLACES, versions
from trainer.runtime.processes import Processes

# What may differ all the same, as "PIECE: KEY".
MAY_DIFFER = (
    *(f"config: {place}" for place in PLACES),  # what lies there is compared
    "config: run.output_dir", "config: *.cache_dir",  # the main process writes, and each may keep encodings of its own
    "config: validation.samples.*.references*", "config: validation.samples.*.truth",  # places; the main process draws
    "config: data.num_workers",  # by a machine's cores; what is read ahead is the same
    # By a card's memory. They change no byte, but of compiled blocks, where "environment: compiled" has them.
    "config: memory.gradient_checkpointing", "config: memory.offload", "config: memory.resident_blocks",
    "start: file", "progress: started",  # a name and a clock; files have the main process's
    "quantization: *.library", "quantization: *.relative_error",  # to be read: the bytes are compared
)  # fmt: skip
# It changes the last bits of a process's share of a sum, which all then add alike. A deterministic run goes on with the same.
HARDWARE = ("environment: device", "environment: kernels", "environment: attention")
# Pieces that follow from the others, and that the main process alone writes.
DERIVED = ("norms", "origin")

LISTED = 20  # lines of a refusal, and names in one of them


def refuse_unlike_configs(peers: Processes, config: Config) -> None:
    """Compare the resolved config's keys, by which the processes know what they do in common, before they do it; and
    versions. Raises UserError, in all processes, with the keys and versions that differ."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    ours = {"trainer": f"{__version__}, source {_digest(''.join(file.read_text(encoding='utf-8') for file in files))}"}
    _compare(peers, config, lambda: {"config": configs.tree(config), "versions": ours | versions(config.optimizer.name)})


def refuse_unlike_data(peers: Processes, plan: RunPlan, pieces: Pieces) -> None:
    """Compare photos, captions, model files by their sizes and headers, and what the run goes on from. plan: its model's
    files are here. Raises UserError, in all processes, with what differs, and the names of photos."""
    source, held_out = plan.model.source, plan.data.held_out

    def data() -> dict[str, Mapping[str, Any]]:
        files = {
            component.name: [[f.path.stat().st_size, _digest(repr(sorted(f.entries.items())))] for f in weights.files]
            for component in source.family.components
            for weights in [source.weights(component.name)]
        }
        of_model = {"model": source.contents((), str), "model files": files}
        return pieces.states() | of_model | {"held-out photos": identity.fingerprint(held_out)}

    _compare(peers, plan.config, data, lambda: identity.photo_digests((*plan.data.examples, *held_out)))


def refuse_unlike_states(peers: Processes, config: Config, pieces: Pieces) -> None:
    """Compare what a checkpoint would have now: the bytes of the frozen base, adapter and optimizer among it. Raises
    UserError, in all processes, with the tensors that differ."""
    _compare(peers, config, lambda: pieces.states(but=DERIVED))


def _compare(
    peers: Processes,
    config: Config,
    states: Callable[[], Mapping[str, Mapping[str, Any]]],
    photos: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """states: by piece. photos: asked for where the data differ. Neither is asked for where there is one process."""
    if peers.count == 1:
        return
    may_differ = MAY_DIFFER if config.run.deterministic else (*MAY_DIFFER, *HARDWARE)
    allowed = re.compile("|".join(map(translate, may_differ)))
    flat = {f"{name}: {key}": value for name, state in states().items() for key, value in configs.flatten(state).items()}
    values = {key: value for key, value in flat.items() if not allowed.match(key)}
    values |= {key: tensor_sha256(value)[:12] for key, value in values.items() if isinstance(value, torch.Tensor)}
    differences = peers.differences({key: json.dumps(value) for key, value in values.items()})
    if not differences:
        return
    of_data = {key for key in differences if key.startswith(("data: ", "held-out photos: "))}
    lines = _of_photos(peers, photos()) if photos is not None and of_data else []
    left = [key for key in differences if not (lines and key in of_data)]
    lines += [f"{key.removeprefix('config: ')}: {_by_rank(differences[key])}" for key in left[:LISTED]]
    lines += [f"and {len(left) - LISTED} more"] * (len(left) > LISTED)
    remedy = "give all of them the same config, photos, model files, versions and checkpoints, and start all again"
    raise UserError("\n".join(["the processes of this run do not train the same:", *lines, remedy]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _by_rank(values: Sequence[str | None]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("absent" if value is None else shown(json.loads(value)), []).append(str(rank))
    return ", ".join(f"{text} in process{'es' if ids[1:] else ''} {shortlist(ids, LISTED)}" for text, ids in ranks.items())


def _of_photos(peers: Processes, digests: Mapping[str, torch.Tensor]) -> list[str]:
    """How the photos of each process differ from those of process 0, in words. digests: what `photo_digests` gives."""
    texts = peers.exchange(json.dumps({name: tensor.tolist() for name, tensor in digests.items()}))
    tables = [{name: torch.tensor(rows, dtype=torch.uint8) for name, rows in json.loads(text).items()} for text in texts]
    return [
        f"photos of process {rank}, beside those of process 0: {how}: {shortlist(names, LISTED)}"
        for rank, table in enumerate(tables)
        for how, names in identity.differences(tables[0], table).items()
    ]

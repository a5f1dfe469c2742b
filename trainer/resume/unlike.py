"""Checks that all processes of a run train the same (docs/processes.md). Each reads its own copies of config, photos and
model, which may be stale. So the pieces of a checkpoint are compared three times: the config when the processes connect, data
and files before a weight is read, all tensors before step 1."""

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

# Permitted differences, as "PIECE: KEY".
MAY_DIFFER = (
    *(f"config: {place}" for place in PLACES),  # their contents are compared
    "config: run.output_dir", "config: *.cache_dir",  # only the main process writes; caches may be separate
    "config: validation.samples.*.references*", "config: validation.samples.*.truth",  # paths; only the main process draws
    "config: data.num_workers",  # depends on the cores; the data are the same
    # Depend on a card's memory. They change bytes only of compiled blocks, where "environment: compiled" contains them.
    "config: memory.gradient_checkpointing", "config: memory.offload", "config: memory.resident_blocks",
    "start: file", "progress: started",  # a name and a clock; the main process's are written
    "quantization: *.library", "quantization: *.relative_error",  # informative: the bytes are compared
)  # fmt: skip
# Changes the last bits of a process's partial sums, which all then add alike. A deterministic run needs the same hardware.
HARDWARE = ("environment: device", "environment: kernels", "environment: attention")
# Pieces derived from the others; only the main process writes them.
DERIVED = ("norms", "origin")

LISTED = 20  # maximum lines of a message, and names in a line


def refuse_unlike_configs(peers: Processes, config: Config) -> None:
    """Compare the resolved configs and versions, first of all. Raises UserError, in all processes, with the differences."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    ours = {"trainer": f"{__version__}, source {_digest(''.join(file.read_text(encoding='utf-8') for file in files))}"}
    _compare(peers, config, lambda: {"config": configs.tree(config), "versions": ours | versions(config.optimizer.name)})


def refuse_unlike_data(peers: Processes, plan: RunPlan, pieces: Pieces) -> None:
    """Compare photos, captions, sizes and headers of the model's files (which must be local), and the checkpoint. Raises
    UserError in all processes, with the differences and names of photos."""
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
    """Compare all pieces and their tensors' bytes, the frozen base's included. Raises UserError in all processes."""
    _compare(peers, config, lambda: pieces.states(but=DERIVED))


def _compare(
    peers: Processes,
    config: Config,
    states: Callable[[], Mapping[str, Mapping[str, Any]]],
    photos: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Raises UserError if the states (by piece) differ. photos: digests, called if data differ. No-op for one process."""
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
    others = [key for key in differences if not (lines and key in of_data)]
    lines += [f"{key.removeprefix('config: ')}: {_by_rank(differences[key])}" for key in others[:LISTED]]
    lines += [f"and {len(others) - LISTED} more"] * (len(others) > LISTED)
    remedy = "give all of them the same config, photos, model files, versions and checkpoints, and start all again"
    raise UserError("\n".join(["the processes of this run do not train the same:", *lines, remedy]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _by_rank(values: Sequence[str | None]) -> str:
    """The distinct values with their ranks, in words."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("absent" if value is None else shown(json.loads(value)), []).append(str(rank))
    return ", ".join(f"{text} in process{'es' if ids[1:] else ''} {shortlist(ids, LISTED)}" for text, ids in ranks.items())


def _of_photos(peers: Processes, digests: Mapping[str, torch.Tensor]) -> list[str]:
    """The differences of each process's photos from those of process 0, in words. digests: of `photo_digests`."""
    texts = peers.exchange(json.dumps({name: tensor.tolist() for name, tensor in digests.items()}))
    tables = [{name: torch.tensor(rows, dtype=torch.uint8) for name, rows in json.loads(text).items()} for text in texts]
    return [
        f"photos of process {rank}, beside those of process 0: {difference}: {shortlist(names, LISTED)}"
        for rank, table in enumerate(tables)
        for difference, names in identity.differences(tables[0], table).items()
    ]

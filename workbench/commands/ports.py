"""The parts that `python train.py` gives a run (trainer/artifacts/ports.py). A key that needs a deleted folder is refused."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from trainer.artifacts.ports import Ports


def _part(folder: str, module: str = "") -> Any:
    return import_module(f"workbench.{folder}{module}") if find_spec(f"workbench.{folder}") else None


PORTS = Ports(
    hub=_part("hub", ".hub"),
    adapter_files=_part("adapter_files", ".start"),
    layouts=getattr(_part("sources"), "LAYOUTS", None),
    planning=_part("planning", ".fitting"),
    pages=_part("pages", ".run_report"),
    summary=_part("summary", ".plan"),
    trackers=_part("trackers", ".trackers"),
    mirror=_part("mirror", ".mirroring"),
)

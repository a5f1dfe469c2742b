"""run.deterministic = true on a CPU: the flags, and that no operation of a run is refused. On CUDA: test_gpu.py.

The flags belong to the process, so everything that sets them runs in one of its own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import ROOT, Workbench
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.engine.step import Step, StepResult
from trainer.runtime import precision
from workbench.commands import launch

# What CUDA has only without a fixed order of sums, so that torch.use_deterministic_algorithms(True) refuses it there (its
# docstring in torch 2.13): a CPU runs it and says nothing. cumsum and bincount: of floating-point numbers only.
REFUSED_ON_CUDA = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d",
    "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "nll_loss_forward", "nll_loss2d_forward", "_ctc_loss_backward", "_embedding_bag_dense_backward", "put", "put_", "histc",
    "median", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "scatter_reduce",
}  # fmt: skip
REFUSED_FOR_FLOATS = {"cumsum", "cumsum_", "bincount"}

CELLS = {
    "sdxl": dict(
        adapter__type="dora", optimizer__name="adamw8bit",
        model__components={"unet": {"dtype": "fp8_e4m3"}}, memory__gradient_checkpointing=True,
        adapter__targets=["*.attn1.to_q", "*.attn2.to_v", "*resnets.0.conv1", "*upsamplers.0.conv"],
        adapter__rules=[{"component": "text_encoder_2", "match": "*.q_proj"}],
    ),
    "flux": dict(
        adapter__dropout=0.3, adapter__targets=["*.attn.to_q", "*.proj_out"],
        adapter__rules=[{"component": "text_encoder_2", "match": "*.q"}],
        model__components={"transformer": {"dtype": "fp8_e4m3"}},
    ),
}  # fmt: skip


class Operations(TorchDispatchMode):
    """The names of all operations that run inside, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floats = isinstance(args[0], torch.Tensor) and args[0].is_floating_point() if args else False
        if name not in REFUSED_FOR_FLOATS or floats:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def child(family: str, models: Path, folder: Path) -> dict:
    """What the process of the test does: the flags, and the operations seen."""
    folder.mkdir()
    precision.be_deterministic()
    result: dict = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
        "attention": {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        },
    }
    torch.use_deterministic_algorithms(False)
    bench = Workbench(models, folder)

    def train(out: str) -> None:
        tree = bench.tree(
            family, run__output_dir=str(folder / out), run__deterministic=True, run__max_steps=2, **CELLS[family]
        )
        launch.train(configs.parse(tree), resume_from=None)

    be_deterministic, one_step = precision.be_deterministic, Step.run

    def and_fill() -> None:
        """NaN in whatever was never written: a read of it would show."""
        be_deterministic()
        torch.utils.deterministic.fill_uninitialized_memory = True

    def and_watch(*args) -> StepResult:
        with operations:
            return one_step(*args)

    operations = Operations()
    Step.run = and_watch
    train("whole")
    Step.run = one_step
    result["operations"] = sorted(operations.seen)
    precision.be_deterministic = and_fill
    train("filled")
    precision.be_deterministic = be_deterministic
    result["deterministic at the end"] = torch.are_deterministic_algorithms_enabled()
    return result


@pytest.mark.slow
def test_both_families_train_and_end_in_the_same_bytes(models: Path, tmp_path: Path) -> None:
    """Also with NaN in fresh memory; nothing that a step does is refused here, or on CUDA."""
    result_file = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.integration.test_deterministic", str(models), str(tmp_path), str(result_file)]
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for family, result in json.loads(result_file.read_text()).items():
        seen = set(result.pop("operations"))
        assert result == {
            "deterministic": True, "warns only": False, "fills": False, "benchmark": False, "workspace": ":4096:8",
            "attention": {"flash": True, "mem_efficient": True, "math": True, "cudnn": False},
            "deterministic at the end": True,
        }, family  # fmt: skip
        for file in ("adapter.safetensors", "optimizer.safetensors"):
            name = f"checkpoints/step-00000002/{file}"
            assert len({(tmp_path / family / out / name).read_bytes() for out in ("whole", "filled")}) == 1, (family, file)
        assert "native_layer_norm" in seen and any(name.endswith("_backward") for name in seen), (family, seen)
        refused = seen & (REFUSED_ON_CUDA | REFUSED_FOR_FLOATS)
        assert not refused, (family, refused)


def test_another_workspace_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG = ':0:0'; unset it, or use ':4096:8' or ':16:8'"):
        precision.be_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()


if __name__ == "__main__":
    gc.disable()  # as train.py does while it imports
    models, folder, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps({family: child(family, models, folder / family) for family in CELLS}))

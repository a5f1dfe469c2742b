"""Where nothing compiles, a run is refused before a weight is read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch.utils import _triton

from trainer.base.errors import UserError
from trainer.runtime.compilation import check_compiler


def test_a_cpu_needs_a_c_compiler_and_pythons_headers(monkeypatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    check_compiler(cpu)  # as the tests that compile ask of this machine
    lacks = r"'blocks' on cpu needs a C\+\+ compiler, and there is no no-such-compiler; "
    with config.patch("cpp.cxx", (None, "no-such-compiler")), pytest.raises(UserError, match=lacks):
        check_compiler(cpu)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=f"no Python.h in {tmp_path}; install python3-dev, or set step.compile = 'none'"):
        check_compiler(cpu)


def test_a_gpu_needs_triton_and_a_c_compiler_for_its_launchers(monkeypatch) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    with pytest.raises(UserError, match="'blocks' on cuda needs Triton, which is not here; install the triton package, or"):
        check_compiler(card)
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    check_compiler(card)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(UserError, match="needs a C compiler, and there is no no-such-cc or gcc or clang; .* in CC, or set"):
        check_compiler(card)

"""What a plan says of disks."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from trainer.preview import disk_warnings

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "told"), [(2**30 + 2**29, True), (3 * 2**30, False)])
def test_what_two_folders_of_one_disk_need_is_added_up(tmp_path: Path, monkeypatch, free: int, told: bool) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - free, free))
    needs = {"run.output_dir": (tmp_path / "not" / "yet", 2**30), "data.cache_dir": (tmp_path, 2**30)}
    assert disk_warnings(needs) == (
        [
            f"warning: run.output_dir and data.cache_dir need about 2.00 GiB, and the disk of {tmp_path} has 1.50 GiB free; "
            "free some, give another folder, or lower checkpoint.keep_last"
        ]
        if told
        else []
    )
    for key, (folder, size) in needs.items():  # each alone would fit
        assert not disk_warnings({key: (folder, size)})

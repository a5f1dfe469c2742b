"""SkyPilot reads docker/clouds/skypilot.yaml: in an environment of its own, because its requirements are not this project's.

    python tests/proofs/skypilot_task.py [ENVIRONMENT]

ENVIRONMENT: a folder; made there, half a gigabyte from PyPI, unless it is there. Left out, it is made in a temporary one. No
cloud is asked. Exit status 1 where SkyPilot refuses the file, or takes a broken one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKYPILOT = "skypilot==0.14.1"
TASK = ROOT / "docker" / "clouds" / "skypilot.yaml"
READ = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(wanted,) = task.resources
assert wanted.use_spot and wanted.accelerators == {"H100": 1}, wanted
assert wanted.job_recovery["recover_on_exit_codes"] == [143], wanted.job_recovery
assert task.storage_mounts["/outputs"].mode.value == "MOUNT_CACHED" and task.file_mounts["/data"], task
task.update_secrets([("HF_TOKEN", "hf_of_the_proof")])  # --secret-file
print("SkyPilot", sky.__version__, "reads", task)
"""
# Each of these it has to refuse: before, after.
BROKEN = [
    ("use_spot: true", "use_spots: true"),
    ("recover_on_exit_codes: [143]", "recover_on_exit_codes: [1430]"),
    ("mode: MOUNT_CACHED", "mode: MOUNTED"),
    ("setup: bash", "set_up: bash"),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", nargs="?", type=Path, metavar="ENVIRONMENT")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        environment = (chosen.environment or Path(temporary, "environment")).absolute()
        python = environment / "bin" / "python"
        if not python.exists():
            venv.create(environment, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", SKYPILOT], check=True)
        # As a clone that followed docker/README.md: data/ is there. SkyPilot writes below its home.
        folder = Path(temporary, "clone")
        for name in ("data", "docker/clouds"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        text = TASK.read_text(encoding="utf-8")
        wrong = 0
        for before, after in [("", ""), *BROKEN]:
            assert before in text, before
            (folder / TASK.relative_to(ROOT)).write_text(text.replace(before, after, 1) if before else text, encoding="utf-8")
            read = subprocess.run(
                [python, "-c", READ, TASK.relative_to(ROOT)],
                cwd=folder,
                env=os.environ | {"HOME": temporary, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
                capture_output=True,
                text=True,
            )
            said = (read.stdout + read.stderr).strip().splitlines() or [""]
            taken = read.returncode == 0
            print(f"{after or 'as it is'}: {'taken' if taken else 'refused'}: {said[-1]}")
            wrong += taken != (not before)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

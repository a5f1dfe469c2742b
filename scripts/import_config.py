"""A config of this program from one of sd-scripts, kohya_ss, OneTrainer, ai-toolkit or SimpleTuner.

    python scripts/import_config.py train_lora_flux_24gb.yaml
    python scripts/import_config.py train.sh --data dataset.toml --set model.family=sdxl --out bear.toml

FILE: sd-scripts' TOML, or a file with its command line; the JSON that kohya_ss's window saves, read as the options that it
gives sd-scripts; OneTrainer's JSON; ai-toolkit's YAML; SimpleTuner's JSON. Each line of the result says where it comes from;
its head says what has no equivalent and what differs. docs/import.md has an example.

Exit status: 0 done; 2 for a file of no trainer that is known, and for what would train something else here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from trainer.base.console import write  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402


def imported(chosen: argparse.Namespace) -> None:
    """Write the config, and say what is to be known of it."""
    from workbench.importing.draft import FILL, SAME
    from workbench.importing.writing import import_config

    overrides = [item for group in chosen.overrides for item in group]
    path, draft = import_config(chosen.file, chosen.out, data=chosen.data, overrides=overrides)
    write(f"{draft.trainer}: {path}")
    for heading, notes in sorted(draft.notes.items(), key=lambda pair: pair[0] == FILL):  # last, for it comes first in work
        if notes and heading == SAME:
            names = dict.fromkeys(note.partition(" = ")[0] for note in notes)
            write(f"{heading}: {', '.join(names)}; the file's head says why")
            continue
        if notes:
            write(f"{heading}:")
        for note in notes:
            write(f"  {note}")
    write(f"next: {'fill that in, then ' if draft.notes[FILL] else ''}python train.py --config {path} --plan")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=Path, help="the other trainer's config")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where it goes; default: NAME.toml here, NAME the run's")
    parser.add_argument(
        "--data", metavar="FILE", type=Path, action="append", default=[],
        help="a file that FILE names and that does not lie where it says: of data, concepts, samples; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="overrides", metavar="table.key=VALUE", action="append", nargs="+", default=[],
        help="this in place of what FILE says, as of train.py",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: imported(chosen))


if __name__ == "__main__":
    sys.exit(main())

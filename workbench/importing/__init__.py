"""Configs of other trainers become ours: `scripts/import_config.py`.

    reading.py   a file -> whose it is, and its options by name
    draft.py     the config while it is made: each key with where it came from, and what is said beside it
    common.py    what all of them need: families, layers, optimizers, schedules, plain renames
    ONE.py       what one program's options mean, where they are not only called otherwise
    writing.py   the draft -> a checked config, and its text

The names that stand for one another are in trainer/base/other_trainers.json, all else that is known in catalogues.py.
"""

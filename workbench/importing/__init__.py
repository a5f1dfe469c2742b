"""Configs of other trainers become ours: `scripts/import_config.py`.

reading.py finds whose a file is, and its options; ONE.py makes a draft of them with common.py; writing.py checks it and
gives its text. Names that stand for one another are in trainer/base/other_trainers.json, all else that is known in
catalogues.py.
"""

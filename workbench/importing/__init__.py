"""Translates configs of other trainers to ours: `scripts/import_config.py`.

reading.py identifies the program and reads its options; a module for each program fills a draft with common.py; writing.py
checks and writes it. The table of names is trainer/base/other_trainers.json; other facts are in catalogues.py.
"""

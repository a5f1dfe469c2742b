"""What a person does with runs: commands, adapter files, imports, audits, replays, comparisons.

`trainer/` imports nothing of it.
"""

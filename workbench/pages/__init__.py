"""report.html: one self-contained page about a run, from its files and the running program. It loads nothing from elsewhere,
so it can be opened from a file, mailed or printed."""

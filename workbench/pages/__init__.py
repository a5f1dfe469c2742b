"""report.html: one self-contained page about a run, made from what the run left on disk and what it tells of itself. It
loads nothing from anywhere, so it can be opened from a file, mailed or printed."""

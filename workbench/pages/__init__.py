"""report.html: one self-contained page about a run, made from what the run left on disk and what it tells of itself.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. PIL is imported when a page is written.
"""

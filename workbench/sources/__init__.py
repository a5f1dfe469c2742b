"""Photos that lie in no plain folder: datasets of the library `datasets`, and tar archives. LAYOUTS: what reads them."""

from workbench.sources import hf, shards

LAYOUTS = (hf, shards)

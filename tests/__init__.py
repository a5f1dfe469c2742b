"""Loaded before any module of the tests, and so before torch."""

import os

# One thread whatever the machine: byte equality is promised for one thread count, and the tests run side by side, a worker
# on each core. Processes that a test starts inherit it. OpenMP reads it once, while torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

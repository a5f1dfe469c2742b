"""The fixed draws at which the held-out loss is measured: how many, of which photos."""

import math

from trainer.plan.run_plan import DataPlan

QUARTERS = 4  # of the range of timesteps: each has the same number of draws
# Held-out photos. With 4 the interval of a change is 3.2 standard errors to either side, with 2 it is 12.7 (student.py).
ENOUGH = 4
FEWEST = 32  # draws of each kind of photo, however few photos there are


def draws_of(photos: int) -> int:
    """The number of draws of each photo if `photos` are measured: a multiple of QUARTERS."""
    return QUARTERS * math.ceil(FEWEST / (QUARTERS * photos)) if photos else 0


def copies(data: DataPlan) -> int:
    """The number of measured held-out photos with a near duplicate that is trained on."""
    held_out = {example.photo.sample for example in data.held_out}
    measured = {example.photo.sample for example in data.measured.get("held_out", ())}
    groups = [{photo.sample for photo in group} for group in data.alike]
    return sum(len(group & measured) for group in groups if group - held_out)


def at_once(data: DataPlan) -> int:
    """The batch size, in draws of one photo: at most a step's images, whose backward takes more memory."""
    return min(data.table.batch_size, max(draws_of(len(examples)) for examples in data.measured.values()))


def forwards(data: DataPlan) -> int:
    """The number of images that pass the denoiser in one measurement."""
    return sum(len(examples) * draws_of(len(examples)) for examples in data.measured.values())

"""How frozen weights are stored: the formats, the layers that hold them, and what model files hold quantised already."""

from trainer.quantization.cache import ConvertedWeights
from trainer.quantization.convolutions import FrozenConv2d, Geometry
from trainer.quantization.formats import Format
from trainer.quantization.freeze import freeze_layers, frozen_like, storage_of_layers
from trainer.quantization.layers import FrozenLayer, FrozenLinear, Home, Payload, copy_payload
from trainer.quantization.quantised_files import declared, recognise
from trainer.quantization.record import REPORT_COLUMNS, Stored, library, record, scaled_layers, stored_as
from trainer.quantization.table import ALL_FORMATS, FORMATS, formats_of

__all__ = [
    "ALL_FORMATS", "FORMATS", "REPORT_COLUMNS", "ConvertedWeights", "Format", "FrozenConv2d", "FrozenLayer",
    "FrozenLinear", "Geometry", "Home", "Payload", "Stored", "copy_payload", "declared", "formats_of", "freeze_layers",
    "frozen_like", "library", "recognise", "record", "scaled_layers", "storage_of_layers", "stored_as",
]  # fmt: skip

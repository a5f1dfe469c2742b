"""A reference trainer for LoRA and DoRA adapters on SDXL and Flux."""

__version__ = "0.1.0"

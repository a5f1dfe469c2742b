"""The making of the pocket models in examples/."""

import tomllib
from pathlib import Path

# The configs of the models' parts.
CONFIGS = tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))

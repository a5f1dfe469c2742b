"""The hashes by which programs know an adapter file, whatever else its header says."""

import hashlib

from trainer.base.files import Advance, no_progress
from trainer.base.tensorfile import Tensors, serialize

# The bytes of a file that kohya's old hash is of.
LEGACY_HASHED = (0x100000, 0x110000)


def with_hash(tensors: Tensors, fields: dict[str, str], advance: Advance = no_progress) -> dict[str, str]:
    """`fields` with the hashes by which programs know a file whatever else its header says.

    `sshs_model_hash`, and `modelspec.hash_sha256` with 0x before it: SHA-256 of everything behind the header.
    `sshs_legacy_hash`: the first 8 digits of the SHA-256 of LEGACY_HASHED, in the file as it is with the `ss_*` entries alone
    (sd-scripts, library/train_util.py, precalculate_safetensors_hashes).
    """
    data, window, at = hashlib.sha256(), hashlib.sha256(), 0
    first, last = LEGACY_HASHED
    for piece in serialize(tensors, {key: value for key, value in fields.items() if key.startswith("ss_")}):
        if at:  # the header comes first
            data.update(piece)
        window.update(piece[max(0, first - at) : max(0, last - at)])
        at += len(piece)
        advance(0)
    digest = data.hexdigest()
    hashes = {"sshs_model_hash": digest, "sshs_legacy_hash": window.hexdigest()[:8], "modelspec.hash_sha256": f"0x{digest}"}
    return fields | hashes

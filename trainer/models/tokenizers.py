"""Tokenizers: from a model's folder, or CLIP's from the merges embedded here (see published/NOTICE.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainer.errors import UserError

EMBEDDED_MERGES = Path(__file__).parent / "published" / "clip_bpe_merges.txt.gz"
START, END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 77
# Any one of these makes a folder a whole tokenizer; a tokenizer_config.json alone does not.
VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in CLIP's (and GPT-2's) BPE, in vocabulary order.

    Source: `bytes_to_unicode` in openai/CLIP, `simple_tokenizer.py`: printable bytes first, standing for themselves.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = len(set(range(256)) - set(printable))
    return [chr(code) for code in printable] + [chr(256 + i) for i in range(others)]


def clip_vocabulary(merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Ids in OpenAI's order: bytes, bytes that end a word, merges, start, end. "!" is 0, the end token the largest."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, *(f"{c}</w>" for c in alphabet), *(a + b for a, b in merges), START, END]
    return {token: i for i, token in enumerate(tokens)}


@cache
def embedded_merges() -> tuple[tuple[str, str], ...]:
    """The 48,894 merges of both published CLIP tokenizers; with the bytes and two special tokens, 49,408 ids."""
    lines = gzip.decompress(EMBEDDED_MERGES.read_bytes()).decode("utf-8").splitlines()
    return tuple((left, right) for left, right in (line.split() for line in lines[1:]))  # the first line is a version


def build_clip_tokenizer(folder: Path | None, pad_token: str | None = None) -> Any:
    """A transformers CLIPTokenizer of 77 tokens from `folder`, or from the embedded merges where it is None.

    pad_token: `<|endoftext|>` for CLIP-L, `!` (id 0) for SDXL's tokenizer_2; None keeps the folder's own choice.
    """
    from transformers import CLIPTokenizer

    if folder is not None:
        return CLIPTokenizer.from_pretrained(folder, **({} if pad_token is None else {"pad_token": pad_token}))
    merges = list(embedded_merges())
    return CLIPTokenizer(
        vocab=clip_vocabulary(merges),
        merges=merges,
        unk_token=END,
        bos_token=START,
        eos_token=END,
        pad_token=END if pad_token is None else pad_token,
        model_max_length=CLIP_LENGTH,
    )


def load_tokenizer(root: Path, name: str) -> Any:
    """The tokenizer in `root`/`name`; where that folder only says "CLIPTokenizer", the embedded vocabulary.

    Raises UserError where there is neither: T5's sentencepiece model is not embedded.
    """
    folder = root / name
    settings = folder / "tokenizer_config.json"
    whole = any((folder / file).is_file() for file in VOCABULARIES)
    try:
        config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError as error:
        raise UserError(f"{settings} is not valid JSON: {error}") from error
    kind = config.get("tokenizer_class", "")
    if kind.startswith("CLIPTokenizer"):
        if whole:
            return build_clip_tokenizer(folder)
        pad = config.get("pad_token", END)
        return build_clip_tokenizer(None, pad["content"] if isinstance(pad, dict) else pad)
    if not whole:
        raise UserError(
            f"the model has no {name} ({folder} has none of {', '.join(VOCABULARIES)}), and only CLIP's tokenizer is "
            f"embedded: set model.config to a folder that has {name}/, as the model's repository on the hub has"
        )
    from transformers import AutoTokenizer, T5TokenizerFast

    chosen = T5TokenizerFast if kind.startswith("T5Tokenizer") else AutoTokenizer
    try:
        # Said in so many words: left out, transformers asks at the terminal whether it may run the folder's own code.
        return chosen.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UserError(
            f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}\ncode of a model's own is never run; "
            "set model.config to a folder with a tokenizer of transformers"
        ) from error

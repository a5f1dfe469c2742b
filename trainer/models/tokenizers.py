"""Tokenizers: from a model's folder, or CLIP's from the embedded merges (see published/NOTICE.md)."""

import gzip
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainer.base.errors import AGAIN, UserError, reading, shown
from trainer.models.config_files import read_json

EMBEDDED_MERGES = Path(__file__).parent / "published" / "clip_bpe_merges.txt.gz"
START, END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 77
SHORTEST, LONGEST = 3, 2**20  # tokens of a text: a start, a word and an end; more than any encoder's positions
# Any one of these makes a folder a whole tokenizer; a tokenizer_config.json alone does not.
VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")
# ComfyUI's own tokenizers, below its folder, by the encoder's class.
COMFYUI = {"T5EncoderModel": "comfy/text_encoders/t5_tokenizer"}


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in CLIP's (and GPT-2's) BPE, in vocabulary order.

    Source: `bytes_to_unicode` in openai/CLIP, `simple_tokenizer.py`: printable bytes stand for themselves, the others for
    characters from 256 on; so the order is that of code points.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def clip_vocabulary(merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Ids in OpenAI's order: bytes, bytes that end a word, merges, start, end. "!" is 0, the end token has the largest."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, *(f"{c}</w>" for c in alphabet), *(a + b for a, b in merges), START, END]
    return {token: i for i, token in enumerate(tokens)}


@cache
def embedded_merges() -> tuple[tuple[str, str], ...]:
    """The 48,894 merges of both published CLIP tokenizers; 49,408 ids with the bytes and two special tokens."""
    lines = gzip.decompress(EMBEDDED_MERGES.read_bytes()).decode("utf-8").splitlines()
    return tuple((left, right) for left, right in (line.split() for line in lines[1:]))  # the first line is a version


def build_clip_tokenizer(folder: Path | None, pad_token: str = END) -> Any:
    """A transformers CLIPTokenizer of 77 tokens from `folder`; None: from the embedded merges.

    pad_token: for the embedded one: `<|endoftext|>` for CLIP-L, `!` (id 0) for SDXL's tokenizer_2.
    """
    from transformers import CLIPTokenizer

    if folder is None:
        merges = list(embedded_merges())
        special = {"unk_token": END, "bos_token": START, "eos_token": END, "pad_token": END}
        tokenizer = CLIPTokenizer(vocab=clip_vocabulary(merges), merges=merges, model_max_length=CLIP_LENGTH, **special)
    else:
        tokenizer = CLIPTokenizer.from_pretrained(folder)
        pad_token = tokenizer.pad_token or END
        if pad_token not in (START, END) and tokenizer.backend_tokenizer.model.token_to_id(pad_token) is not None:
            others = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content != pad_token}
            tokenizer = CLIPTokenizer.from_pretrained(folder, pad_token=END, added_tokens_decoder=others)
    # Set after construction: given to the constructor, it would be a special token, and be cut out of texts. To open_clip
    # and ComfyUI the padding is an id, and "!" a word like any other.
    tokenizer.pad_token = pad_token
    return tokenizer


def _config(folder: Path) -> dict[str, Any]:
    settings = folder / "tokenizer_config.json"
    return read_json(settings) if settings.is_file() else {}


def _is_a(name: str, config: dict[str, Any]) -> bool:
    return str(config.get("tokenizer_class", "")).startswith(name)


def _padding(config: dict[str, Any]) -> str:
    pad = config.get("pad_token") or END
    return pad["content"] if isinstance(pad, dict) else pad


def padding_rule(folder: Path) -> bytes:
    """The part of a tokenizer's fingerprint besides its files.

    Change this text when the same files give other ids than before. Empty until then: earlier caches stay valid.
    """
    config = _config(folder)
    odd = _is_a("CLIPTokenizer", config) and _padding(config) != END
    return b"the padding token is a word of the text" if odd else b""


def _is_whole(folder: Path) -> bool:
    return any((folder / file).is_file() for file in VOCABULARIES)


def is_usable(folder: Path, *, chat: bool = False) -> bool:
    """Whether the folder gives a tokenizer: CLIP's vocabulary is embedded. chat: whether it needs a chat template."""
    return (
        _is_whole(folder) and has_template(folder) if chat else _is_whole(folder) or _is_a("CLIPTokenizer", _config(folder))
    )


def has_template(folder: Path) -> bool:
    """Whether the folder's tokenizer has a chat template."""
    return "chat_template" in _config(folder) or any((folder / f"chat_template.{end}").is_file() for end in ("jinja", "json"))


def beside(files: Sequence[Path], name: str, encoder_class: str, *, chat: bool = False) -> Path | None:
    """The folder of a usable tokenizer beside one of these files, or of ComfyUI's own above it; None if there is none."""
    comfy = COMFYUI.get(encoder_class)
    folders = [file.parent / name for file in files]
    folders += [parent / comfy for file in files for parent in file.absolute().parents if comfy]
    return next((folder for folder in folders if is_usable(folder, chat=chat)), None)


def check_tokenizer(folder: Path, name: str, *, chat: bool = False) -> bool:
    """Whether the folder has its own vocabulary. name: of the tokenizer. Raises UserError if the folder lacks a vocabulary or
    chat template that it needs."""
    whole = _is_whole(folder)
    if not whole and not is_usable(folder):
        raise UserError(
            f"the model has no {name} ({folder} has none of {', '.join(VOCABULARIES)}), and only CLIP's tokenizer is "
            f"embedded: set model.config to a folder that has {name}/, as the model's repository on the hub has"
        )
    if chat and not has_template(folder):
        raise UserError(
            f"the {name} in {folder} has no chat template, by which this model's captions are written: copy the folder "
            f"{name}/ of the model's repository on the hub there"
        )
    return whole


def load_tokenizer(folder: Path, name: str, encoder: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer in a folder, with the embedded vocabulary if the folder only says "CLIPTokenizer".

    name: of the tokenizer. encoder: the config of the text encoder that reads its tokens. Raises UserError if the folder
    lacks a vocabulary that it needs, if its files give no tokenizer of transformers that encodes a text, and if that has
    tokens without an embedding in the encoder.
    """
    whole = check_tokenizer(folder, name)
    config, file = _config(folder), folder / "tokenizer.json"
    remedy = "download the folder again; code of a model's own is never run, so it must be a tokenizer of transformers"
    if file.is_file():
        from tokenizers import Tokenizer

        with reading(file, remedy=AGAIN):
            Tokenizer.from_file(str(file))
    with reading(folder, "the tokenizer cannot be read", remedy=remedy):
        tokenizer = _made(folder, config, whole)
        # Later uses, tried now: padding, a length, and the template of chats.
        tokenizer(["a", "b c"], padding="max_length", max_length=8, truncation=True, return_tensors="pt")
        length = tokenizer.model_max_length
        if not isinstance(length, int) or length < SHORTEST:
            raise ValueError(f"model_max_length = {shown(length)}, where others have a count of tokens")
        if has_template(folder):
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    _fit(tokenizer, folder, encoder or {})
    return tokenizer


def _fit(tokenizer: Any, folder: Path, encoder: Mapping[str, Any]) -> None:
    """Fit a tokenizer to its encoder's config: a text is no longer than the encoder has positions (transformers writes 10**30
    for a length that nobody gave). Raises UserError for a token without an embedding."""
    added = tokenizer.get_added_vocab()
    last = max(added, key=added.__getitem__, default=None)
    largest, rows = max(tokenizer.vocab_size - 1, added.get(last, 0)), encoder.get("vocab_size")
    if rows is not None and largest >= rows:
        word = f"the token {shown(last)}" if last is not None and added[last] == largest else "its last token"
        raise UserError(
            f"{folder}: {word} has the id {largest}, and the text encoder has embeddings for {rows} tokens (vocab_size in "
            "its config.json); words that were added, as textual inversion does, need the encoder that was saved with them: "
            "take both folders from one model, or the tokenizer without these words"
        )
    tokenizer.model_max_length = min(tokenizer.model_max_length, encoder.get("max_position_embeddings") or LONGEST)


def _made(folder: Path, config: dict[str, Any], whole: bool) -> Any:
    if _is_a("CLIPTokenizer", config):
        return build_clip_tokenizer(folder) if whole else build_clip_tokenizer(None, _padding(config))
    from transformers import AutoTokenizer, T5TokenizerFast

    cls = T5TokenizerFast if _is_a("T5Tokenizer", config) else AutoTokenizer
    # Explicit: otherwise transformers asks at the terminal whether it may run the folder's own code.
    return cls.from_pretrained(folder, trust_remote_code=False)

"""Captions to ids: what every reader of CLIP gives, the padding token in the text too."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AddedToken, CLIPTokenizer

from tests.harness import Workbench
from trainer.base.errors import UserError
from trainer.data.cache.fill import text_key
from trainer.models import FAMILIES
from trainer.models.base import Model
from trainer.models.config_files import PUBLISHED
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.models.shared.clip import clip_ids
from trainer.models.tokenizers import END, START, byte_alphabet, clip_vocabulary, embedded_merges, load_tokenizer

CAPTIONS = ["wow!", "! a bear", "!!", "a!b", "a bear!!  x!?", "no mark at all", "", "!" * 100, "été! ☃!"]
LENGTH = 77


def byte_pair_ids(caption: str, merges: list[tuple[str, str]], padding: int) -> list[int]:
    """OpenAI's algorithm (simple_tokenizer.py) by hand, for text without special tokens."""
    vocabulary, ranks = clip_vocabulary(merges), {pair: rank for rank, pair in enumerate(merges)}
    of_byte = dict(zip(sorted(range(256), key=lambda b: (not _printable(b), b)), byte_alphabet(), strict=True))
    ids = [vocabulary[START]]
    for word in re.findall(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|[^\s\w]+", " ".join(caption.lower().split())):
        parts = [of_byte[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        while len(parts) > 1:
            rank, at = min((ranks.get((parts[i], parts[i + 1]), len(ranks)), i) for i in range(len(parts) - 1))
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [vocabulary[part] for part in parts]
    ids = ids[: LENGTH - 1] + [vocabulary[END]]
    return ids + [padding] * (LENGTH - len(ids))


def _printable(byte: int) -> bool:
    return chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)


def published_layout(folder: Path, target: Path) -> Path:
    """As stabilityai/stable-diffusion-xl-base-1.0 has it: the added tokens are listed, the padding token among them."""
    target.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (target / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = json.loads((folder / "vocab.json").read_text())
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings["added_tokens_decoder"] = {str(vocabulary[t]): plain | {"content": t} for t in ("!", START, END)}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "special_tokens_map.json").write_text(json.dumps({"pad_token": "!", "eos_token": END, "bos_token": START}))
    return target


def one_file(folder: Path, target: Path) -> Path:
    CLIPTokenizer.from_pretrained(folder).save_pretrained(target)
    assert not (target / "vocab.json").exists()
    return target


@pytest.mark.parametrize("layout", ["embedded", "folder", "published folder", "tokenizer.json"])
def test_an_exclamation_mark_is_a_word_and_not_the_padding(bench: Workbench, layout: str) -> None:
    """transformers takes the padding token out of the text: SDXL's second encoder was told 0, which is the padding."""
    folder = bench.models / "sdxl" / "tokenizer_2"
    target = bench.tmp / "tokenizer_2"
    if layout == "embedded":
        target, merges = PUBLISHED / "sdxl" / "tokenizer_2", list(embedded_merges())
    else:
        lines = (folder / "merges.txt").read_text().splitlines()[1:]
        merges = [(left, right) for left, right in (line.split() for line in lines)]
        if layout == "folder":
            target = folder
        else:
            (published_layout if layout.startswith("published") else one_file)(folder, target)
    tokenizer = load_tokenizer(target, "tokenizer_2")
    assert tokenizer.pad_token == "!" and tokenizer.pad_token_id == 0
    for caption, ids in zip(CAPTIONS, clip_ids(tokenizer, CAPTIONS).tolist(), strict=True):
        assert ids == byte_pair_ids(caption, merges, padding=0), caption
    assert clip_ids(tokenizer, ["!"]).tolist()[0][:4] == [tokenizer.bos_token_id, 256, tokenizer.eos_token_id, 0]
    first = load_tokenizer((PUBLISHED if layout == "embedded" else bench.models) / "sdxl/tokenizer", "tokenizer")
    for caption, ids in zip(CAPTIONS, clip_ids(first, CAPTIONS).tolist(), strict=True):
        assert ids == byte_pair_ids(caption, merges, padding=first.eos_token_id), caption


@pytest.mark.parametrize(
    ("family", "guidance", "limits"), [("sdxl", False, [77, 77]), ("flux", True, [77, 512]), ("flux", False, [77, 256])]
)
def test_a_caption_is_cut_where_it_is_told_to_be(bench: Workbench, family: str, guidance: bool, limits: list[int]) -> None:
    """AnimaLora #496: a caption of 600 tokens was cut elsewhere. FLUX.2's, in its chat message: test_flux2.py."""
    chosen, words = FAMILIES[family], ["bear"] * 600
    tokenizers = load_tokenizers(chosen, open_model(chosen, str(bench.models / family)))
    model = Model({}, {"transformer": {"guidance_embeds": guidance}}, tokenizers, {}, {}, torch.device("cpu"))
    told = chosen.text.count(model, [" ".join(words)])
    assert [limit for _, limit in told.values()] == limits
    for name, ((count,), limit) in told.items():

        def ids(number: int, encoder: str = chosen.files.tokenizers[name]) -> list[int]:
            changed = " ".join("photo" if place == number else word for place, word in enumerate(words))
            return chosen.text.tokens(model, encoder, [changed])[0].flatten().tolist()

        last = limit - (count - len(words)) - 1  # of the words that are read
        assert len(ids(599)) == limit < count and ids(last + 1) == ids(599) != ids(last)


def test_a_folders_other_added_tokens_stay(bench: Workbench) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(bench.models / "sdxl" / "tokenizer_2")
    tokenizer.add_tokens([AddedToken("<bear>")])
    tokenizer.save_pretrained(bench.tmp / "tokenizer_2")
    ids = load_tokenizer(bench.tmp / "tokenizer_2", "tokenizer_2")("a <bear>!").input_ids
    assert ids[2:4] == [tokenizer.convert_tokens_to_ids("<bear>"), 256]


def test_a_token_without_an_embedding_is_refused_by_its_folder(bench: Workbench) -> None:
    """Textual inversion adds words to the tokenizer, and leaves an encoder that was not saved with them behind."""
    folder = bench.tmp / "tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(bench.models / "sdxl" / "tokenizer")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<sks>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=f"the token '<sks>' has the id {rows}, .* embeddings for {rows} tokens") as error:
        load_tokenizer(folder, "tokenizer", {"vocab_size": rows})
    assert str(folder) in str(error.value)
    assert load_tokenizer(folder, "tokenizer", {"vocab_size": rows + 1})("<sks>").input_ids[1] == rows


def test_a_length_that_nobody_gave_is_that_of_the_encoder(bench: Workbench) -> None:
    """transformers writes 10**30 for it, and a text padded so far fits in no memory."""
    folder = shutil.copytree(bench.models / "sdxl" / "tokenizer", bench.tmp / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": int(1e30)}))
    tokenizer = load_tokenizer(folder, "tokenizer", {"max_position_embeddings": LENGTH})
    assert clip_ids(tokenizer, ["a bear"]).shape == (1, LENGTH)


def test_encodings_of_the_old_reading_are_not_found(bench: Workbench) -> None:
    """Where the reading of the same files changed, the key of a cached caption does; elsewhere it is what it was."""
    import hashlib

    for family, changed in (("sdxl", True), ("flux", False)):
        source = open_model(FAMILIES[family], str(bench.models / family))
        before = hashlib.sha256()
        for name in FAMILIES[family].files.tokenizers:
            for path in sorted((bench.models / family / name).glob("*")):
                before.update(path.name.encode() + b"\0" + path.read_bytes())
        old, new = (text_key("wow!", fingerprint=f) for f in (before.hexdigest(), source.tokenizer_fingerprint))
        assert (old != new) == changed


def test_hidden_files_beside_a_tokenizer_are_none_of_it(bench: Workbench) -> None:
    folder = shutil.copytree(bench.models / "sdxl", bench.tmp / "model")
    before = open_model(FAMILIES["sdxl"], str(folder)).tokenizer_fingerprint
    (folder / "tokenizer" / ".DS_Store").write_bytes(b"\0")
    (folder / "tokenizer" / ".ipynb_checkpoints").mkdir()
    (folder / "tokenizer_2" / "older").mkdir()
    assert open_model(FAMILIES["sdxl"], str(folder)).tokenizer_fingerprint == before
    (folder / "tokenizer" / "added.json").write_text("{}")
    assert open_model(FAMILIES["sdxl"], str(folder)).tokenizer_fingerprint != before

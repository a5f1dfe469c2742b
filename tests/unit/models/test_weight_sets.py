"""Which files of a component's folder are read where there are several sets of them."""

from __future__ import annotations

from itertools import product

import pytest

from trainer.base.errors import UserError
from trainer.models.weight_sets import choose, weight_sets

GIB = 2**30


def names(stem: str, layout: str, variant: str | None) -> list[str]:
    """The files of one set, as the libraries write them."""
    dot = f".{variant}" if variant else ""
    return {
        "absent": [],
        "single": [f"{stem}{dot}.safetensors"],
        "sharded": [f"{stem}{dot}-0000{n}-of-00002.safetensors" for n in (1, 2)] + [f"{stem}.safetensors.index{dot}.json"],
        "formerly": [f"{stem}-0000{n}-of-00002{dot}.safetensors" for n in (1, 2)] + [f"{stem}.safetensors{dot}.index.json"],
    }[layout]


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model"])
def test_names_are_read_as_diffusers_reads_them(stem: str) -> None:
    """The oracle takes the variant where a component has it, else the plain files; `other` keeps it content."""
    from diffusers.pipelines.pipeline_loading_utils import variant_compatible_siblings

    for plain, variant in product(("absent", "single", "sharded"), ("absent", "single", "sharded", "formerly")):
        there = names(stem, plain, None) + names(stem, variant, "fp16") + names(stem, "single", "bf16")
        if plain == variant == "absent":
            continue
        listing = dict.fromkeys([*there, "config.json", f"{stem}.bin", f"{stem}.fp16.bin", "model_index.json"], 100)
        chosen = choose(weight_sets(listing), variant="fp16", stored="fp32", where="unet").files
        ours = {f"unet/{name}" for name in (*chosen.names, *([chosen.index] if chosen.index else ()))}
        files = {f"unet/{name}" for name in listing if not name.endswith(".bin")} | {"other/model.fp16.safetensors"}
        theirs, _ = variant_compatible_siblings(files, variant="fp16")
        assert ours == {name for name in theirs if name.startswith("unet/")}, (plain, variant)
        assert chosen.whole and chosen.bytes == 100 * len(chosen.names)


def sets(**sizes: float):
    """Sets by variant ("plain" for none), of sizes in GiB."""
    listing = {
        f"model.{name}.safetensors" if name != "plain" else "model.safetensors": int(size * GIB)
        for name, size in sizes.items()
    }
    return weight_sets(listing)


@pytest.mark.parametrize(
    "there, stored, taken, said",
    [
        # Only plain files: as ever, without a word.
        (dict(plain=10), "fp32", None, ""),
        (dict(plain=10), "nf4", None, ""),
        # fp32 files and 16-bit ones.
        (dict(plain=10, fp16=5), "fp32", None, "fp32 is asked for"),
        (dict(plain=10, fp16=5), "bf16", "fp16", "enough for bf16; the plain ones have 10.00 GiB"),
        (dict(plain=10, fp16=5), "fp8_e4m3", "fp16", "enough for fp8_e4m3; the plain ones have 10.00 GiB"),
        # 16-bit files and others of the same size, up to their headers.
        (dict(plain=5.001, fp16=5), "bf16", None, "the fp16 files are not smaller"),
        # Two 16-bit sets: the one that is stored; else the finer one.
        (dict(plain=10, fp16=5, bf16=5.001), "bf16", "bf16", "enough for bf16; the plain ones have 10.00 GiB"),
        (dict(plain=10, fp16=5.001, bf16=5), "int8", "fp16", "enough for int8; the plain ones have 10.00 GiB"),
        # Weights of another kind are never taken unasked.
        (dict(plain=10, ema=5), "bf16", None, ""),
        # No plain files at all.
        (dict(fp16=5), "fp32", "fp16", "the only ones there"),
        (dict(fp16=5, bf16=5), "bf16", "bf16", "there are bf16 files, 5.00 GiB and fp16 files, 5.00 GiB"),
    ],
)
def test_the_smallest_that_loses_nothing(there, stored, taken, said) -> None:
    chosen = choose(sets(**there), variant=None, stored=stored, where="unet")
    assert (chosen.files.variant, chosen.reason) == (taken, said)


def test_a_variant_that_is_asked_for() -> None:
    both = sets(plain=10, fp16=5, ema=10)
    for asked, taken in (("fp16", "fp16"), ("none", None), ("ema", "ema")):
        assert choose(both, variant=asked, stored="fp32", where="unet").files.variant == taken
    lacking = choose(both, variant="bf16", stored="bf16", where="unet")
    assert (lacking.files.variant, lacking.reason) == (None, "no bf16 files there")
    with pytest.raises(UserError, match="model.variant = 'bf16': unet has no such files, only fp16 files"):
        choose(sets(fp16=5), variant="bf16", stored="bf16", where="unet")
    with pytest.raises(UserError, match="unet has only ema files.*model.variant"):
        choose(sets(ema=5), variant=None, stored="bf16", where="unet")


def test_an_index_without_all_its_shards_is_not_whole() -> None:
    listing = dict.fromkeys(names("model", "sharded", None), 1)
    assert weight_sets(listing)[0].whole
    del listing["model-00002-of-00002.safetensors"]
    assert not weight_sets(listing)[0].whole
    assert weight_sets({"model.safetensors.index.json": 1})[0].whole is False


def test_shards_that_are_not_all_there_win_only_where_nothing_is_whole() -> None:
    half = names("model", "sharded", "fp16")[1:]
    both = dict.fromkeys(half, 4 * GIB) | {"model.safetensors": 10 * GIB}
    for listing, stored, taken in ((both, "bf16", None), (dict.fromkeys(half, 4 * GIB), "bf16", "fp16")):
        chosen = choose(weight_sets(listing), variant=None, stored=stored, where="unet")
        assert chosen.files.variant == taken
    # Named, it is what is meant: that a shard is missing is told when it is opened.
    assert choose(weight_sets(both), variant="fp16", stored="bf16", where="unet").files.variant == "fp16"

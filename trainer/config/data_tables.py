"""The keys of the data: photos, captions, batches, caches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config import kinds
from trainer.config.kinds import Count, GivenPath, Positive, ReadWith, Share, Table, expand_source


def _different(resolutions: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(resolutions)) < len(resolutions):
        raise ValueError("each resolution once; to show photos more often, raise repeats")
    return resolutions


Resolution = Annotated[int, Field(ge=16, multiple_of=8)]
Resolutions = Resolution | Annotated[tuple[Resolution, ...], Field(strict=False, min_length=1), AfterValidator(_different)]
Masks = Literal["none", "files", "alpha"]
Unmasked = Annotated[float, Field(ge=0, lt=1)]  # at 1 a mask would change nothing


class SourceTable(Table):
    """One folder of photos, or one other source of them."""

    path: Annotated[str, AfterValidator(expand_source)]
    """A folder, a metadata file (`.jsonl`, `.csv`, `.parquet`), `.tar` archives, or `hf:NAME@SPLIT`."""
    repeats: Count = 1
    """How often each photo appears in an epoch."""
    captions: Literal["auto", "filename", "folder", "none"] = "auto"
    """Where captions come from. `auto`: metadata, else files beside the photos, else kohya's folder names."""
    image_column: str | None = None
    """The column of images in metadata or a dataset. Left out: `file_name`, or the dataset's image column."""
    caption_column: Annotated[str | None, ReadWith("captions", ("auto",))] = None
    """The column of captions, or the field in `.json` files. Left out: `caption`, else `text`, else `prompt`."""
    masks: GivenPath | None = None
    """As `data.masks`, for this source; or the folder of its masks, which have the photos' names."""
    unmasked_weight: Unmasked | None = None
    """As `data.unmasked_weight`, for this source."""
    references: GivenPath | Annotated[tuple[GivenPath, ...], Field(strict=False, min_length=1)] | None = None
    """Reference images of each photo: `files` beside it (`NAME.ref.png`, `NAME.ref2.png`), a folder of them, or a list with a
    folder for each of a photo's references, under the photo's name."""
    held_out: Annotated[str, Field(min_length=1), AfterValidator(expand_source)] | None = None
    """Photos that are not trained on, instead of those that `data.held_out` draws: a folder, or any other `path`."""
    loss_weight: Positive = 1.0
    """Multiplies the loss of each photo."""
    regularisation: bool = False
    """These photos preserve what the model knew before. They are not the subject."""
    resolution: Resolutions | None = None
    """As `data.resolution`, for this source."""
    flip: bool | None = None
    """As `data.flip`, for this source."""
    caption_dropout: Share | None = None
    """As `data.caption_dropout`, for this source."""
    caption_lines: bool = False
    """Every line of a caption file is a caption of its own. Each appearance draws one."""
    wildcards: bool = False
    """`{red|blue}` in a caption becomes one of the two."""
    separator: Annotated[str, Field(min_length=1), ReadWith("shuffle tag_dropout trigger")] = ", "
    """The text between tags, and after the trigger."""
    keep: Annotated[int, Field(ge=0), ReadWith("shuffle tag_dropout")] = 0
    """The number of first tags that are neither dropped nor moved."""
    keep_separator: Annotated[str, ReadWith("shuffle tag_dropout")] = ""
    """The text between kept tags and the others, as `|||`. Tags after a second one are kept, too."""
    tag_dropout: Share = 0.0
    """The chance that a tag is dropped."""
    shuffle: bool = False
    """Shuffle the tags of a caption."""
    prefix: str = ""
    """Text before every caption."""
    suffix: str = ""
    """Text after every caption."""
    trigger: str = ""
    """The words that call the subject. They are put before captions that do not contain them."""

    @model_validator(mode="after")
    def _check_combinations(self) -> SourceTable:
        if self.held_out and self.regularisation:
            raise ValueError("held_out: regularisation images are never held out; leave it out")
        if isinstance(self.references, tuple) and "files" in self.references:
            raise ValueError("references: 'files' stands alone; in a list give folders")
        return self


class DataTable(Table):
    """The photos, and how they become batches."""

    sources: Annotated[tuple[SourceTable, ...], Field(strict=False, min_length=1)]
    """Where the photos are: below."""
    resolution: Resolutions = 1024
    """Photos are cut to about this many pixels, squared. A list trains every photo at each size."""
    batch_size: Count = 1
    """Photos in a batch, for each process."""
    short_batches: Annotated[Literal["keep", "merge"], ReadWith("data.batch_size", above=1)] = "keep"
    """`merge` fills the last batch of each bucket."""
    held_out: kinds.PhotosOrShare = 0
    """Photos that are not trained on, to tell learning from memorising: a count, or a share below 1."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read ahead."""
    bucket_step: Annotated[int, Field(ge=8, multiple_of=8)] | None = None
    """The sides of buckets are multiples of it. Left out: a quarter of the lowest resolution, from 16 to 64."""
    max_aspect: Annotated[float, Field(ge=1, le=16)] = 2.0
    """The longest buckets: their long side over the short one. Photos beyond it are cropped to it."""
    crop: Literal["centre", "none"] = "centre"
    """`none` cuts nothing: the whole photo is scaled to its bucket, and its aspect ratio becomes the bucket's."""
    enlarge: bool = False
    """Scale a photo up if it is smaller than its bucket."""
    background: kinds.Colour = "#ffffff"
    """The colour behind transparent parts of a photo."""
    masks: Masks = "none"
    """Weight the loss by a mask: `files` (`NAME.mask.png`, `NAME-masklabel.png`), or `alpha` (transparency)."""
    unmasked_weight: Unmasked = 0.0
    """The loss weight of a mask's black parts."""
    crop_jitter: Annotated[float, Field(ge=0, le=0.5), ReadWith("data.crop", ("centre",))] = 0.0
    """How far a crop may move and zoom, as a share of its sides."""
    colour_jitter: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """How far brightness, contrast and saturation may vary, as a share."""
    image_variants: Annotated[int, Field(ge=2), ReadWith("data.crop_jitter data.colour_jitter")] = 4
    """The number of variants of each photo. The first is unchanged."""
    flip: bool = False
    """Mirror a photo with a chance of one half, drawn for each appearance. Leave it off for faces and text."""
    caption_dropout: Share = 0.05
    """The chance that an appearance trains on the empty caption."""
    caption_variants: Count = 8
    """The number of variants of a caption that varies (shuffle, tag dropout, wildcards, lines)."""
    strict_captions: bool = False
    """Refuse captions that are missing, empty or too long."""
    cache: Literal["disk", "memory", "none"] = "disk"
    """Where encoded photos and captions are kept."""
    cache_limit: Annotated[kinds.SizeText | None, ReadWith("data.cache", ("disk",))] = None
    """The most that the cache on disk may take, for example `"20GB"`. The least recently used entries are deleted."""
    cache_text: Literal["auto"] | bool = "auto"
    """Keep the captions' encodings. `auto` does so unless a text encoder is adapted."""
    text_length: Count | None = None
    """How many tokens T5 or Qwen3 reads. Left out: 512; 256 for schnell, 8192 for FLUX.3."""
    clip_chunks: Annotated[int, Field(ge=1, le=3)] = 1
    """2 and 3 read captions of up to 150 and 225 tokens, in chunks of 75 as ComfyUI does."""
    weighted_captions: bool = False
    """Read `(word:1.2)`, `(word)` and `[word]` in captions and prompts as weights, by sd-scripts' own arithmetic."""
    cache_dir: kinds.PathText | None = None
    """The folder of the cache on disk. Left out: `OUTPUT_DIR/cache`."""

    @model_validator(mode="after")
    def _check_combinations(self) -> DataTable:
        if all(source.regularisation for source in self.sources):
            raise ValueError("data.sources: all have regularisation = true; at least one must hold the subject, without it")
        if self.held_out and any(source.held_out for source in self.sources):
            raise ValueError("data.held_out and a source's own held_out are both set; leave one out")
        if self.crop == "none" and self.short_batches == "merge":
            reason = "moves photos to other shapes, which data.crop = 'none' would stretch"
            raise ValueError(f"data.short_batches = 'merge' {reason}; leave one out")
        return self

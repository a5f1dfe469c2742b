"""Encodes photos and captions to latents and conditioning: into the cache before the first step, or as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from trainer.base.errors import UserError
from trainer.base.tensorfile import size_text
from trainer.base.types import Conditioning
from trainer.data.batches.loader import Encoders, Reader
from trainer.data.cache import fill
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.cache.texts import TOGETHER, one_after_another
from trainer.data.captions import captions
from trainer.data.examples import Example
from trainer.data.images.views import View
from trainer.engine.components import Components
from trainer.models.base import Family, Model
from trainer.plan.requirements import preserve_as
from trainer.plan.run_plan import DataPlan, RunPlan
from trainer.runtime import precision
from trainer.runtime.processes import Processes


class Encodings(NamedTuple):
    """The inputs of all encodings that a run takes from its cache, by key: views of photos, of masks, captions, prompts."""

    latents: Mapping[str, tuple[Example, View]]
    masks: Mapping[str, tuple[Example, View]]
    captions: Mapping[str, str]
    prompts: Mapping[str, str]

    @staticmethod
    def of(plan: RunPlan, latents: str, texts: str | None) -> Encodings:
        """A run's encodings. latents, texts: the encoders' fingerprints; texts None: captions are encoded live."""
        seed = plan.data.seed
        return Encodings(
            fill.latents_wanted(plan.data.encoded, seed=seed, fingerprint=latents),
            fill.masks_wanted(plan.data.examples, seed=seed, side=plan.model.family.images.latent_side),
            {} if texts is None else fill.texts_wanted(captions_of(plan), fingerprint=texts),
            {} if texts is None else fill.texts_wanted(prompts_of(plan), fingerprint=texts),
        )

    def only(self, selected: Callable[[str], bool]) -> Encodings:
        """The encodings with selected keys."""
        return Encodings(*({key: value for key, value in part.items() if selected(key)} for part in self))


def encode(
    plan: RunPlan, components: Components, cache: Cache | MemoryCache | None, *, on_non_finite: Callable[[str], None]
) -> Reader:
    """Fill the cache, and return the run's Reader. Encoders are loaded only for missing entries, one at a time; without a
    cache all of them stay loaded.

    In a cache on disk each process encodes its share, then what its own disk still lacks; in memory each encodes all.
    on_non_finite: called for every photo and caption whose encoding is not finite; if it raises, the encoding is not kept.
    """
    family, processes = components.family, components.processes
    encoders = plan.model.before_steps
    latents = components.fingerprint(family.vae)
    texts = components.text_fingerprint() if plan.model.cache_text else None
    live = None
    if cache is None:
        live = Encoders(encoder_of_images(components), components.encode_prompts)
        tensors = [tensor for name in encoders for tensor in components.load(name).state_dict().values()]
        size = size_text(sum(tensor.nbytes for tensor in tensors))
        processes.say(f"cache: none; {', '.join(encoders)} stay in memory ({size}), photos are encoded when they are drawn")
    else:
        encodings = Encodings.of(plan, latents, texts)
        # All entries before any is encoded: data.cache_limit deletes entries that nobody claims.
        for part in encodings:
            cache.claim(part)
        if isinstance(cache, Cache):
            for line in filter(None, (cache.unprotected, *cache.damaged)):
                processes.say(f"warning: {line}")
        if isinstance(cache, Cache) and processes.count > 1:
            counts = _fill(encodings.only(processes.takes), plan, components, cache, on_non_finite)
            processes.wait(obey=True)
            _fill(encodings.only(lambda key: not processes.takes(key)), plan, components, cache, on_non_finite)
        else:
            counts = _fill(encodings, plan, components, cache, on_non_finite)
        totals = processes.total(*counts) if isinstance(cache, Cache) else counts
        masks = f", {totals[2]} masks" if encodings.masks else ""
        processes.say(f"cache: {totals[0]} latents{masks} and {totals[1]} texts encoded, the rest was there")
        components.unload(() if plan.data.requests else (family.vae,))
    if isinstance(cache, Cache) and cache.limit is not None:
        _keep_limit(components.processes, cache, plan.data.table.cache_limit)
    return Reader(
        examples={example.sample: example for example in plan.data.examples},
        cache=cache,
        seed=plan.data.seed,
        latent_side=family.images.latent_side,
        latent_fingerprint=latents,
        text_fingerprint=texts,
        collate=family.text.collate,
        encoders=live,
        preserve_as=preserve_as(plan.config),
    )


def _fill(
    items: Encodings, plan: RunPlan, components: Components, cache: Cache | MemoryCache, on_non_finite: Callable[[str], None]
) -> tuple[int, int, int]:
    """Encode entries that the cache lacks. Returns how many (latents, texts, masks)."""
    processes, phases, family = components.processes, components.phases, components.family

    def on_black(name: str) -> None:
        processes.say(f"warning: {name} are not finite; samples of that prompt will be black")

    texts = 0
    if plan.model.cache_text:
        # First, so that no text encoder is in memory beside the VAE, which stays for samples.
        texts = fill.fill_text(
            cache,
            items.captions,
            items.prompts,
            encode=partial(
                one_after_another,
                encoders={name: partial(components.text_encoder, name) for name in family.text_encoders},
                join=family.text.join,
                together=captions_at_once(plan),
                say=processes.say,
                phases=phases,
            ),
            on_non_finite=on_non_finite,
            on_black=on_black,
            phases=phases,
        )
    latents = fill.fill_latents(
        cache, items.latents, encode=encoder_of_images(components), on_non_finite=on_non_finite, phases=phases
    )
    return latents, texts, fill.fill_masks(cache, items.masks, side=family.images.latent_side, phases=phases)


def encoder_of_images(components: Components) -> Callable[[Tensor], Tensor]:
    """The function that encodes photos. In TF32 it compares its first photo with fp32, and raises UserError if the relative
    error of the latents is above precision.FAST."""
    error = None

    def encode(pixels: Tensor) -> Tensor:
        nonlocal error
        latents = components.encode_images(pixels)
        if error is None and bool(latents.isfinite().all()):
            exact = components.encode_images(pixels, exact=True)
            error = float((latents - exact).norm() / exact.norm())
            components.processes.say(f"vae.encode = 'fast': the first photo's latents are off by {error:.1e}, of their norm")
            if error > precision.FAST:
                raise UserError(
                    f"vae.encode = 'fast': with this VAE latents are off by {error:.1e}, and at most {precision.FAST:.0e} is "
                    "allowed; leave it out"
                )
        return latents

    return encode if components.plan.storage[components.family.vae].tf32 else components.encode_images


def captions_at_once(plan: RunPlan) -> int:
    """How many captions may be encoded at once without a change of bytes."""
    # T5 in fp16 clamps all captions of a batch if one overflows; captions with fewer chunks than others are repeated.
    half = precision.needs_scaling(plan.model.storage[name].compute for name in plan.model.family.text_encoders)
    return 1 if plan.data.table.clip_chunks > 1 or half else TOGETHER


def captions_of(plan: RunPlan) -> list[str]:
    """All captions to encode, one for each photo that has it; with objective.preserve also those without triggers."""
    pairs = [(caption, example) for example in plan.data.encoded for caption in example.captions]
    replacement = preserve_as(plan.config)
    preserved = [] if replacement is None else [captions.preserved(*pair, replacement) for pair in pairs]
    return [*(caption for caption, _ in pairs), *preserved]


def prompts_of(plan: RunPlan) -> list[str]:
    """The prompts and negative prompts of all samples."""
    return [text for request in plan.data.requests for text in (request.prompt, request.negative)]


def _keep_limit(processes: Processes, cache: Cache, limit: str) -> None:
    """Delete unused entries above data.cache_limit once all processes have filled the cache, as each did meanwhile."""
    processes.wait(obey=True)
    if processes.is_main:
        cache.keep_limit()
        if cache.pruned:
            processes.say(f"cache: {cache.pruned} files that no run uses were deleted (data.cache_limit = {limit!r})")
        if cache.over_limit:
            processes.say(
                f"warning: data.cache_limit = {limit!r}: the cache holds {size_text(cache.over_limit)} more, all of it in "
                "use by this run or another; raise the limit, or give this run a cache of its own"
            )


def prompt_conditioning(components: Components, reader: Reader, text: str) -> Conditioning:
    """The conditioning of one prompt, on the run's device: from the cache, or encoded live if captions are."""
    if reader.text_fingerprint is None:
        return components.family.encode_prompts(components.model, [text])
    return reader.conditioning([text]).to(components.model.device)


def conditionings(components: Components, texts: list[str]) -> Callable[[str], Conditioning]:
    """A function text -> conditioning: encoded now, one encoder after another, or live if an encoder is adapted."""
    plan, family = components.plan, components.family
    if not plan.cache_text:
        return lambda text: family.encode_prompts(components.model, [text])
    encoders = {name: partial(components.text_encoder, name) for name in family.text_encoders}
    encoded = dict(one_after_another(list(dict.fromkeys(texts)), encoders, join=family.text.join, phases=components.phases))
    return lambda text: family.text.collate([encoded[text]]).to(components.model.device)


def report_captions(data: DataPlan, family: Family, model: Model) -> captions.CaptionReport:
    """A report of missing, empty and overlong captions. Raises UserError for overlong ones if data.strict_captions is set."""
    texts = list(dict.fromkeys(text for example in (*data.examples, *data.held_out) for text in example.captions))
    counted = {
        family.files.tokenizers[name]: captions.Tokens(limit, dict(zip(texts, counts, strict=True)))
        for name, (counts, limit) in family.text.count(model, texts).items()
    }
    report = captions.report(data.examples, tokens=counted, rows=family.text.rows)
    if data.table.strict_captions:
        captions.refuse_truncated(report)
    return report

"""Photos and captions become latents and conditioning: once, into the cache, before the first step; or when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True)
class Encodings:
    """All that a run takes from its cache, by key: views of photos and of masks, captions, prompts of samples."""

    latents: Mapping[str, tuple[Example, View]]
    masks: Mapping[str, tuple[Example, View]]
    captions: Mapping[str, str]
    prompts: Mapping[str, str]

    @staticmethod
    def of(plan: RunPlan, latents: str, texts: str | None) -> Encodings:
        """The encodings of a run. latents, texts: fingerprints of the encoders; None where captions are encoded live."""
        seed = plan.data.seed
        return Encodings(
            fill.latents_wanted(plan.data.encoded, seed=seed, fingerprint=latents),
            fill.masks_wanted(plan.data.examples, seed=seed, side=plan.model.family.images.latent_side),
            {} if texts is None else fill.texts_wanted(captions_of(plan), fingerprint=texts),
            {} if texts is None else fill.texts_wanted(prompts_of(plan), fingerprint=texts),
        )

    def only(self, mine: Callable[[str], bool]) -> Encodings:
        """The part of it with keys that are mine."""
        parts = (self.latents, self.masks, self.captions, self.prompts)
        return Encodings(*({key: what for key, what in part.items() if mine(key)} for part in parts))


def encode(
    plan: RunPlan, components: Components, cache: Cache | MemoryCache | None, *, on_non_finite: Callable[[str], None]
) -> Reader:
    """Fill the cache; load an encoder only for what is missing, and let it go before the next. Without a cache all stay.

    Each process encodes its share into a cache on disk, then what does not lie on its own disk; into memory it encodes all.
    on_non_finite: told of every photo and caption whose encoding is not finite; where it raises, that is not kept.
    """
    family, processes = components.family, components.processes
    encoders = plan.model.before_steps
    latents = components.fingerprint(family.vae)
    texts = components.text_fingerprint() if plan.model.cache_text else None
    live = None
    if cache is None:
        live = Encoders(encoder_of_images(components), components.encode_prompts)
        tensors = [tensor for name in encoders for tensor in components.load(name).state_dict().values()]
        held = size_text(sum(tensor.nbytes for tensor in tensors))
        processes.say(f"cache: none; {', '.join(encoders)} stay in memory ({held}), photos are encoded when they are drawn")
    else:
        wanted = Encodings.of(plan, latents, texts)
        # All of it before any is encoded: a limit takes what nobody claims.
        for part in (wanted.latents, wanted.masks, wanted.captions, wanted.prompts):
            cache.claim(part)
        if isinstance(cache, Cache):
            for line in filter(None, (cache.unprotected, *cache.damaged)):
                processes.say(f"warning: {line}")
        if isinstance(cache, Cache) and processes.count > 1:
            made = _fill(wanted.only(processes.takes), plan, components, cache, on_non_finite)
            processes.wait(obey=True)
            _fill(wanted.only(lambda key: not processes.takes(key)), plan, components, cache, on_non_finite)
        else:
            made = _fill(wanted, plan, components, cache, on_non_finite)
        counts = processes.total(*made) if isinstance(cache, Cache) else made
        masks = f", {counts[2]} masks" if wanted.masks else ""
        processes.say(f"cache: {counts[0]} latents{masks} and {counts[1]} texts encoded, the rest was there")
        components.let_go(() if plan.data.requests else (family.vae,))
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
    wanted: Encodings, plan: RunPlan, components: Components, cache: Cache | MemoryCache, on_non_finite: Callable[[str], None]
) -> tuple[int, int, int]:
    """How many (latents, texts, masks) were made."""
    processes, phases, family = components.processes, components.phases, components.family

    def black(what: str) -> None:
        processes.say(f"warning: {what} are not finite; samples of that prompt will be black")

    encoded = 0
    if plan.model.cache_text:
        # First, so that no text encoder meets the VAE, which stays for samples.
        encoded = fill.fill_text(
            cache,
            wanted.captions,
            wanted.prompts,
            encode=partial(
                one_after_another,
                encoders={name: partial(components.text_encoder, name) for name in family.text_encoders},
                join=family.text.join,
                together=captions_at_once(plan),
                say=processes.say,
                phases=phases,
            ),
            on_non_finite=on_non_finite,
            on_black=black,
            phases=phases,
        )
    made = fill.fill_latents(
        cache, wanted.latents, encode=encoder_of_images(components), on_non_finite=on_non_finite, phases=phases
    )
    return made, encoded, fill.fill_masks(cache, wanted.masks, side=family.images.latent_side, phases=phases)


def encoder_of_images(components: Components) -> Callable[[Tensor], Tensor]:
    """What encodes photos. In TF32 the first is held against fp32, too. Raises UserError where it is off by too much."""
    off = None

    def encode(pixels: Tensor) -> Tensor:
        nonlocal off
        latents = components.encode_images(pixels)
        if off is None and bool(latents.isfinite().all()):
            exact = components.encode_images(pixels, exact=True)
            off = float((latents - exact).norm() / exact.norm())
            components.processes.say(f"vae.encode = 'fast': the first photo's latents are off by {off:.1e}, of their norm")
            if off > precision.FAST:
                raise UserError(
                    f"vae.encode = 'fast': with this VAE latents are off by {off:.1e}, and at most {precision.FAST:.0e} is "
                    "allowed; leave it out"
                )
        return latents

    return encode if components.plan.storage[components.family.vae].tf32 else components.encode_images


def captions_at_once(plan: RunPlan) -> int:
    """How many captions may be encoded at once, in the same bytes."""
    # T5 in fp16 clamps all captions of a batch once one overflows; captions of fewer chunks than others are repeated.
    half = precision.needs_scaling(plan.model.storage[name].compute for name in plan.model.family.text_encoders)
    return 1 if plan.data.table.clip_chunks > 1 or half else TOGETHER


def captions_of(plan: RunPlan) -> list[str]:
    """Every caption that is encoded, once for each photo that has it; where something is preserved, without triggers, too."""
    written = [(caption, example) for example in plan.data.encoded for caption in example.captions]
    instead = preserve_as(plan.config)
    without = [] if instead is None else [captions.preserved(caption, example, instead) for caption, example in written]
    return [*(caption for caption, _ in written), *without]


def prompts_of(plan: RunPlan) -> list[str]:
    """The prompts and negative prompts of all samples."""
    return [text for request in plan.data.requests for text in (request.prompt, request.negative)]


def _keep_limit(processes: Processes, cache: Cache, limit: str) -> None:
    """Once all processes have filled the cache; while they did, each kept the limit, too. limit: data.cache_limit."""
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
    """The conditioning of one prompt, on the run's device: from the cache, or encoded live where the captions are."""
    if reader.text_fingerprint is None:
        return components.family.encode_prompts(components.model, [text])
    return reader.conditioning([text]).to(components.model.device)


def conditionings(components: Components, texts: list[str]) -> Callable[[str], Conditioning]:
    """text -> its conditioning: made now, one encoder after another, or live where an encoder is adapted."""
    plan, family = components.plan, components.family
    if not plan.cache_text:
        return lambda text: family.encode_prompts(components.model, [text])
    encoders = {name: partial(components.text_encoder, name) for name in family.text_encoders}
    made = dict(one_after_another(list(dict.fromkeys(texts)), encoders, join=family.text.join, phases=components.phases))
    return lambda text: family.text.collate([made[text]]).to(components.model.device)


def report_captions(data: DataPlan, family: Family, model: Model) -> captions.CaptionReport:
    """What is missing, empty or too long. Raises UserError where data.strict_captions refuses one. model: its tokenizers."""
    texts = list(dict.fromkeys(text for example in (*data.examples, *data.held_out) for text in example.captions))
    counted = {
        family.files.tokenizers[name]: captions.Tokens(limit, dict(zip(texts, counts, strict=True)))
        for name, (counts, limit) in family.text.count(model, texts).items()
    }
    report = captions.report(data.examples, tokens=counted, rows=family.text.rows)
    if data.table.strict_captions:
        captions.refuse_truncated(report)
    return report

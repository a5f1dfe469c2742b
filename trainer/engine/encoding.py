"""Photos and captions become latents and conditioning: once, into the cache, before the first step; or when needed."""

from collections.abc import Callable
from functools import partial

from trainer.base.tensorfile import size_text
from trainer.base.types import Conditioning
from trainer.data.batches.loader import Encoders, Reader
from trainer.data.cache import fill
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.cache.texts import TOGETHER, one_after_another
from trainer.data.captions import captions
from trainer.engine.components import Components
from trainer.models.base import Model
from trainer.plan.run_plan import DataPlan, Plan
from trainer.runtime import precision


def encode(
    plan: Plan, components: Components, cache: Cache | MemoryCache | None, *, on_non_finite: Callable[[str], None]
) -> Reader:
    """Fill the cache; load an encoder only for what is missing, and let it go before the next. Without a cache all stay.

    Each process encodes its share into a cache on disk, then looks at the others': it makes what does not lie on its own
    disk. Into its own memory each process encodes all.
    on_non_finite: told of every photo and caption whose encoding is not finite; where it raises, that is not kept.
    """
    family, processes = components.family, components.processes
    encoders = (family.vae, *(family.text_encoders if plan.model.cache_text else ()))
    latents = components.fingerprint(family.vae)
    texts = components.text_fingerprint() if plan.model.cache_text else None
    live = None
    if cache is None:
        live = Encoders(components.encode_images, components.encode_prompts)
        tensors = [tensor for name in encoders for tensor in components.load(name).state_dict().values()]
        held = size_text(sum(tensor.nbytes for tensor in tensors))
        processes.say(f"cache: none; {', '.join(encoders)} stay in memory ({held}), photos are encoded when they are drawn")
    else:
        # All of it before any is encoded: a limit takes what nobody claims.
        seed = plan.config.run.seed
        cache.claim(fill.latents_wanted(plan.encoded, seed=seed, fingerprint=latents))
        cache.claim(fill.masks_wanted(plan.examples, seed=seed, side=family.latent_side))
        if texts is not None:
            cache.claim(fill.texts_wanted((*captions_of(plan), *prompts_of(plan)), fingerprint=texts))
        if isinstance(cache, Cache) and cache.unprotected:
            processes.say(f"warning: {cache.unprotected}")
        if isinstance(cache, Cache) and processes.count > 1:
            made = _fill(plan, components, cache, on_non_finite, latents, texts, processes.takes)
            processes.wait(obey=True)
            _fill(plan, components, cache, on_non_finite, latents, texts, lambda key: not processes.takes(key))
        else:
            made = _fill(plan, components, cache, on_non_finite, latents, texts, lambda key: True)
        counts = processes.total(*made) if isinstance(cache, Cache) else made
        masks = f", {counts[2]} masks" if any(example.photo.mask is not None for example in plan.examples) else ""
        processes.say(f"cache: {counts[0]} latents{masks} and {counts[1]} texts encoded, the rest was there")
        components.let_go(() if plan.requests else (family.vae,))
    if isinstance(cache, Cache) and cache.limit is not None:
        _keep_limit(components, cache)
    return Reader(
        examples={example.sample: example for example in plan.examples},
        cache=cache,
        seed=plan.config.run.seed,
        latent_side=family.latent_side,
        latent_fingerprint=latents,
        text_fingerprint=texts,
        collate=family.collate,
        encoders=live,
    )


def _fill(
    plan: Plan,
    components: Components,
    cache: Cache | MemoryCache,
    on_non_finite: Callable[[str], None],
    latents: str,
    texts: str | None,
    mine: Callable[[str], bool],
) -> tuple[int, int, int]:
    """How many (latents, texts, masks) were made. latents, texts: the encoders' fingerprints. mine: keys to look at."""
    processes, phases = components.processes, components.phases
    seed = plan.config.run.seed

    def black(what: str) -> None:
        processes.say(f"warning: {what} are not finite; samples of that prompt will be black")

    encoded = 0
    if texts is not None:
        # First, so that no text encoder meets the VAE, which stays for samples.
        encoded = fill.fill_text(
            cache,
            captions_of(plan),
            prompts=prompts_of(plan),
            fingerprint=texts,
            encode=partial(
                one_after_another,
                encoders={name: partial(components.text_encoder, name) for name in components.family.text_encoders},
                join=components.family.join,
                together=captions_at_once(plan),
                say=processes.say,
                phases=phases,
            ),
            on_non_finite=on_non_finite,
            on_black=black,
            phases=phases,
            mine=mine,
        )
    made = fill.fill_latents(
        cache,
        plan.encoded,
        seed=seed,
        fingerprint=latents,
        encode=components.encode_images,
        on_non_finite=on_non_finite,
        phases=phases,
        mine=mine,
    )
    masks = fill.fill_masks(cache, plan.examples, seed=seed, side=components.family.latent_side, phases=phases, mine=mine)
    return made, encoded, masks


def captions_at_once(plan: Plan) -> int:
    """How many captions may be encoded at once: of so many, where that gives the same bytes."""
    # T5 in fp16 clamps all captions of a batch once one of them overflows; captions of fewer chunks than others are repeated
    # beside them.
    half = precision.needs_scaling(plan.model.storage[name].compute for name in plan.family.text_encoders)
    return 1 if plan.config.data.clip_chunks > 1 or half else TOGETHER


def captions_of(plan: Plan) -> list[str]:
    """Every caption that is encoded, once for each photo that has it."""
    return [caption for example in plan.encoded for caption in example.captions]


def prompts_of(plan: Plan) -> list[str]:
    """The prompts and negative prompts of all samples."""
    return [text for request in plan.requests for text in (request.prompt, request.negative)]


def _keep_limit(components: Components, cache: Cache) -> None:
    """Once all processes have filled the cache; while they did, each kept the limit, too."""
    processes, limit = components.processes, components.plan.config.data.cache_limit
    processes.wait(obey=True)
    if processes.is_main:
        cache.keep_limit()
        if cache.pruned:
            processes.say(f"cache: {cache.pruned} entries that no run uses were deleted (data.cache_limit = {limit!r})")
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


def report_captions(plan: DataPlan, model: Model) -> captions.CaptionReport:
    """What is missing, empty or too long. Raises UserError where data.strict_captions refuses one. model: its tokenizers."""
    family, every = plan.family, plan.examples
    texts = list(dict.fromkeys(text for example in (*every, *plan.held_out) for text in example.captions))
    counted = {
        family.tokenizers[name]: captions.Tokens(limit, dict(zip(texts, counts, strict=True)))
        for name, (counts, limit) in family.count_tokens(model, texts).items()
    }
    report = captions.report(every, tokens=counted)
    if plan.config.data.strict_captions:
        captions.refuse_truncated(report)
    return report

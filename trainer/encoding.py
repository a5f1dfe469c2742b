"""Photos and captions become latents and conditioning, once: into the cache, before the first step."""

from collections.abc import Callable

from trainer.components import Components
from trainer.data import cache as caches
from trainer.data import captions
from trainer.data.loader import Reader
from trainer.types import Conditioning


def encode(components: Components, cache: caches.Cache, *, on_non_finite: Callable[[str], None]) -> Reader:
    """Fill the cache, by the main process; load an encoder only for what is missing, and let it go again.

    on_non_finite: told of every photo and caption whose encoding is not finite; where it raises, that is not kept.
    """
    plan, family = components.plan, components.family
    processes, phases = components.processes, components.phases
    data, latents = plan.config.data, components.fingerprint(family.vae)
    texts = components.text_fingerprint() if plan.cache_text else None

    def black(what: str) -> None:
        processes.say(f"warning: {what} are not finite; samples of that prompt will be black")

    with processes.main_first():
        made = caches.fill_latents(
            cache,
            plan.photos,
            fingerprint=latents,
            flip=data.flip,
            encode=components.encode_images,
            on_non_finite=on_non_finite,
            phases=phases,
        )
        encoded = 0
        if texts is not None:
            of_photos = [photo.caption for photo, _ in plan.photos]
            of_samples = [text for request in plan.requests for text in (request.prompt, request.negative)]
            for some, warn in ((of_photos, on_non_finite), (of_samples, black)):
                encoded += caches.fill_text(
                    cache, some, fingerprint=texts, encode=components.encode_prompts, on_non_finite=warn, phases=phases
                )
    processes.say(f"cache: {made} latents and {encoded} texts encoded, the rest was there")
    components.let_go([*(family.text_encoders if plan.cache_text else ()), *(() if plan.requests else (family.vae,))])
    return Reader(
        photos={photo.sample: (photo, bucket) for photo, bucket in plan.photos},
        cache=cache,
        seed=plan.config.run.seed,
        flip=data.flip,
        caption_dropout=data.caption_dropout,
        latent_fingerprint=latents,
        text_fingerprint=texts,
        collate=family.collate,
    )


def prompt_conditioning(components: Components, reader: Reader, text: str) -> Conditioning:
    """Of one prompt of a sample, on the run's device: from the cache, or encoded live where the captions are."""
    if reader.text_fingerprint is None:
        return components.family.encode_prompts(components.model, [text])
    return reader.conditioning([text]).to(components.model.device)


def report_captions(components: Components) -> str:
    """How long the captions are, in tokens. Raises UserError where data.strict_captions refuses one."""
    plan, family, model = components.plan, components.family, components.model

    def counter(tokenizer: str) -> Callable[[str], int]:
        return lambda caption: family.count_tokens(model, caption)[tokenizer][0]

    encoders = {name: (counter(name), limit) for name, (_, limit) in family.count_tokens(model, "").items()}
    report = captions.report([photo for photo, _ in plan.photos], encoders=encoders)
    if plan.config.data.strict_captions:
        captions.refuse_truncated(report)
    return str(report)

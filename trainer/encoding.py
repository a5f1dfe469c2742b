"""Photos and captions become latents and conditioning, once: into the cache, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.components import Components
from trainer.data import cache as caches
from trainer.data import captions
from trainer.data.loader import Reader
from trainer.phases import Phases
from trainer.plan import Plan
from trainer.processes import Processes
from trainer.types import Conditioning


@dataclass(frozen=True)
class Encoded:
    """The training data, ready to be read. text_fingerprint: as of `Reader`; None where captions are encoded live."""

    reader: Reader
    cache: caches.Cache
    components: Components
    text_fingerprint: str | None

    def conditioning(self, text: str) -> Conditioning:
        """Of one prompt of a sample, on the run's device."""
        model = self.components.model
        if self.text_fingerprint is None:
            return self.components.family.encode_prompts(model, [text])
        key = caches.text_key(text, fingerprint=self.text_fingerprint)
        return Conditioning.from_tensors(self.cache.get(key)).to(model.device)


def encode(
    plan: Plan, components: Components, cache: caches.Cache, *, processes: Processes, phases: Phases,
    on_non_finite: Callable[[str], None],
) -> Encoded:  # fmt: skip
    """Fill the cache, by the main process; load an encoder only for what is missing, and let it go again.

    on_non_finite: told of every photo and caption whose encoding is not finite; where it raises, that is not kept.
    """
    data, family = plan.config.data, plan.family
    latents = components.fingerprint(family.vae)
    texts = components.text_fingerprint() if plan.cache_text else None

    def black(what: str) -> None:
        processes.say(f"warning: {what} are not finite; samples of that prompt will be black")

    with processes.main_first():
        made = caches.fill_latents(
            cache, plan.photos, fingerprint=latents, flip=data.flip, encode=components.encode_images,
            on_non_finite=on_non_finite, phases=phases,
        )  # fmt: skip
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
    reader = Reader(
        plan.photos, cache, seed=plan.config.run.seed, flip=data.flip, caption_dropout=data.caption_dropout,
        latent_fingerprint=latents, text_fingerprint=texts, collate=family.collate,
    )  # fmt: skip
    return Encoded(reader, cache, components, texts)


def report_captions(plan: Plan, components: Components) -> str:
    """How long the captions are, in tokens. Raises UserError where data.strict_captions refuses one."""
    family, model = plan.family, components.model

    def counter(tokenizer: str) -> Callable[[str], int]:
        return lambda caption: family.count_tokens(model, caption)[tokenizer][0]

    limits = {name: limit for name, (_, limit) in family.count_tokens(model, "").items()}
    report = captions.report(
        [photo for photo, _ in plan.photos], encoders={name: (counter(name), limit) for name, limit in limits.items()}
    )
    if plan.config.data.strict_captions:
        captions.refuse_truncated(report)
    return str(report)

"""The account of the model: assumptions about it, where its parts were found, and which of their files are read."""

from collections.abc import Mapping
from typing import Any

from trainer.base.account import Account, Heading
from trainer.base.tensorfile import size_text
from trainer.models import kinds
from trainer.models.config_files import PUBLISHED, read_json
from trainer.models.loading import ModelSource


def model_account(source: ModelSource, options: Mapping[str, Any]) -> Account:
    """The account of an open model. options: values of the config keys that the family reads, by their last names."""
    account, variant = Account(), source.variant
    if variant.name is not None:
        follows = f": {decides}" if (decides := source.family.variants.effect(variant.name, options)) else ""
        other = next(name for name in source.family.variants.names if name != variant.name)
        account.add(
            Heading.NOTE if variant.certain else Heading.ASSUMED,
            f"the model is {variant.name} or made of it, as {variant.reason}{follows}",
            remedy="" if variant.certain else f"for {other}, model.variant = {other!r}",
        )
    if variant.otherwise:
        account.add(Heading.WARNING, f"the model is {variant.name}, as {variant.reason}, and not {variant.otherwise}")
    _add_named(account, source, options)
    _add_parts(account, source)
    if source.embedded and not source.fetched:
        account.add(Heading.ASSUMED, f"configs as embedded: nothing was fetched ({source.embedded})")
    if count := source.to_fetch():
        account.add(Heading.NOTE, f"to be downloaded {size_text(count)}, into {source.repository.blobs.parent}")
    return account


def _add_named(account: Account, source: ModelSource, options: Mapping[str, Any]) -> None:
    """Warn if the model's name contradicts how it is trained, unless a key or a file confirms the kind in its name."""
    family, name = source.family.name, source.place.names[0]
    is_known = source.markers.v_prediction or source.scheduler.get("prediction_type") == "v_prediction"
    is_known = is_known or options.get("prediction", "auto") != "auto"
    is_known = is_known or source.family.variants.editing == source.variant.name
    for kind, *key in kinds.named_kinds(family, name):
        trained, remedy = key or (kinds.TRAINED[family], "train the model that it was made of")
        if not (key and is_known):
            reason = f"its name says {kind} ({name}), and it is trained as {trained}"
            account.add(Heading.WARNING, reason, remedy=f"if the name is right, {remedy}")


def _add_parts(account: Account, source: ModelSource) -> None:
    index = source.root / "model_index.json"
    if index.is_file() and PUBLISHED not in index.parents:
        pipeline, usual = kinds.class_in(read_json(index)), kinds.PIPELINES.get(source.family.name)
        if source.family.variants.editing == source.variant.name is not None:
            usual = source.family.variants.editing_pipeline
        if usual is not None and pipeline not in ("", usual):
            account.add(Heading.NOTE, f"its pipeline calls itself {pipeline}, and is trained as {usual}")
    if parts := [f"{name}: {place}" for name, place in source.found.items()]:
        remedy = "model.components.NAME.path gives another"
        account.add(Heading.NOTE, "found beside the model", parts, noun="part", remedy=remedy)
    places = {"scheduler": source.beside("scheduler/scheduler_config.json")}
    places |= {name: source.tokenizer_folder(name) for name in source.family.files.tokenizers}
    places |= {component.name: source.config_file(component.name) for component in source.family.components}
    if parts := [name for name, place in places.items() if source.published in place.parents]:
        reason = f"configs of the published {source.published.name}"
        account.add(Heading.ASSUMED, reason, parts, noun="part", remedy="model.config gives a folder of others")
    for component in source.family.components:
        choice = source.weight_choice(component.name)
        if choice is not None and choice.reason:
            account.add(Heading.NOTE, f"{component.name} reads the {choice.files} ({choice.reason})")

"""The TOML contract: every key, its type, its default. The only file that knows TOML.

The tree is frozen and strict. What can be said without looking at a model is refused here, with the key's full name, the
offending value and, for a near miss, the key that was probably meant.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import UserError

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"

Dtype = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4"]
Compute = Literal["fp32", "bf16", "fp16"]
Count = Annotated[int, Field(ge=1)]
Cadence = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]


def expand_home(path: str, given_as: str = "") -> str:
    """`path` with a leading `~` or `~user` as that home folder. Raises UserError where there is no such home.

    given_as: an argument of the command line, for the message; a key of the config is named by `parse`.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        prefix, home = f"{given_as} {path}: " if given_as else "", path.partition("/")[0]
        raise UserError(f"{prefix}there is no home folder {home}; write ./{home} for a folder of that name here")
    return expanded


# Every path that a config gives, so that nothing below this file knows of `~`.
PathText = Annotated[str, AfterValidator(expand_home)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=False)


class RunTable(Table):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output_dir: GivenPath
    seed: Seed = 0
    max_steps: Count | None = None
    epochs: Count | None = None
    stop_after: Count | None = None
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _one_length(self) -> RunTable:
        if (self.max_steps is None) == (self.epochs is None):
            given = "both are" if self.epochs is not None else "neither is"
            raise ValueError(
                f"give exactly one of run.max_steps and run.epochs; {given} given (--set run.max_steps= removes a key)"
            )
        return self


class ComponentTable(Table):
    dtype: Dtype | None = None
    backend: Literal["native", "quanto", "bitsandbytes"] | None = None
    exclude: Strings = ()
    path: PathText | None = None
    compute: Compute | None = None


class ModelTable(Table):
    family: str
    path: GivenPath
    config: PathText | None = None
    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] | None = None
    prediction: Literal["auto", "epsilon", "v"] = "auto"
    zero_terminal_snr: Literal["auto"] | bool = "auto"
    cache_dir: PathText | None = None
    components: dict[str, ComponentTable] = {}


class PrecisionTable(Table):
    compute: Compute = "bf16"
    matmul: Literal["compute", "fp8"] = "compute"
    loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    loss_scale_growth_interval: Count = 2000


class RuleTable(Table):
    component: str
    match: str
    rank: Count | None = None
    alpha: Positive | None = None
    lr: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class AdapterTable(Table):
    type: Literal["lora", "dora"] = "lora"
    rank: Count = 16
    alpha: Positive | None = None
    targets: str | Strings = "attention+mlp"
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    kernels: Literal["auto", "triton", "torch"] = "auto"
    rules: Annotated[tuple[RuleTable, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _dropout_is_lora_only(self) -> AdapterTable:
        if self.type == "dora" and self.dropout:
            raise ValueError(
                f"adapter.dropout = {self.dropout} cannot be combined with adapter.type = 'dora': DoRA's row scale couples "
                "the dropped path with the base; set adapter.dropout = 0 or adapter.type = 'lora'"
            )
        return self


class SourceTable(Table):
    path: PathText
    repeats: Count = 1


class DataTable(Table):
    sources: Annotated[tuple[SourceTable, ...], Field(strict=False, min_length=1)]
    resolution: Annotated[int, Field(ge=16, multiple_of=8)] = 1024
    batch_size: Count = 1
    num_workers: Annotated[int, Field(ge=0)] = 0
    bucket_step: Annotated[int, Field(ge=8, multiple_of=8)] | None = None
    flip: bool = False
    caption_dropout: Share = 0.05
    strict_captions: bool = False
    cache_text: Literal["auto"] | bool = "auto"
    text_length: Count | None = None
    cache_dir: PathText | None = None


class ObjectiveTable(Table):
    timesteps: Literal["auto", "uniform", "logit_normal"] = "auto"
    shift: Literal["auto"] | Positive = "auto"
    logit_mean: float = 0.0
    logit_std: Positive = 1.0
    min_snr_gamma: Positive | None = None
    guidance: Annotated[float, Field(ge=0)] = 1.0


class StepTable(Table):
    accumulation: Count = 1
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    non_finite: Literal["stop", "skip"] = "stop"
    max_skipped: Count = 10


class MemoryTable(Table):
    gradient_checkpointing: bool | Count = False


class OptimizerTable(Table):
    name: str = "adamw"
    lr: Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8
    min_8bit_size: Count = 4096


class ScheduleTable(Table):
    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0.05
    total_steps: Count | None = None


class CheckpointTable(Table):
    every_steps: Cadence = 500
    keep_last: Count = 3
    background: bool = True
    on_failure: Literal["stop", "continue"] = "stop"


class ExportTable(Table):
    every_steps: Cadence = 0
    formats: Annotated[tuple[Literal["diffusers", "comfyui"], ...], Field(strict=False, min_length=1)] = (
        "diffusers",
        "comfyui",
    )
    dora_scale: Literal["comfyui_released", "magnitude"] = "comfyui_released"
    trigger_phrase: str = ""


class SampleTable(Table):
    prompt: str
    negative: str = ""
    width: Count | None = None
    height: Count | None = None
    seed: Seed | None = None
    steps: Count | None = None
    guidance: float | None = None
    strength: Share = 1.0
    truth: str | None = None


class ValidationTable(Table):
    every_steps: Cadence = 500
    prompts: Strings = ()
    samples: Annotated[tuple[SampleTable, ...], Field(strict=False)] = ()
    seed: Seed = 0
    steps: Count = 20

    @model_validator(mode="after")
    def _one_list(self) -> ValidationTable:
        if self.prompts and self.samples:
            raise ValueError("give validation.prompts or [[validation.samples]], not both")
        return self


class LoggingTable(Table):
    tensorboard: bool = True


class Config(Table):
    run: RunTable
    model: ModelTable
    data: DataTable
    precision: PrecisionTable = PrecisionTable()
    adapter: AdapterTable = AdapterTable()
    objective: ObjectiveTable = ObjectiveTable()
    step: StepTable = StepTable()
    memory: MemoryTable = MemoryTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    checkpoint: CheckpointTable = CheckpointTable()
    export: ExportTable = ExportTable()
    validation: ValidationTable = ValidationTable()
    logging: LoggingTable = LoggingTable()


def load(path: str, overrides: list[str]) -> Config:
    """Read the config at `path` (or the bare name of a file in configs/) and apply `table.key=VALUE` overrides.

    Raises UserError for a missing file, bad TOML, an unknown key, a wrong type or an impossible combination.
    """
    file = Path(expand_home(path, "--config"))
    if not file.exists() and file.name == path and (CONFIG_FOLDER / path).exists():
        file = CONFIG_FOLDER / path
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        known = ", ".join(sorted(p.name for p in CONFIG_FOLDER.glob("*.toml")))
        raise UserError(f"--config {path}: {error.strerror}. Files in configs/: {known}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--config {path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Config:
    """A checked Config from a plain tree. Raises UserError with one line for each mistake."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise UserError("\n".join(dict.fromkeys(lines))) from error


def dumps(config: Config) -> str:
    """The resolved config as TOML: every default written out, optional keys without a value left out."""
    import tomli_w

    return tomli_w.dumps(tree(config))


def read_resolved(path: Path) -> dict[str, Any]:
    """The plain tree of a `config.toml` that a run wrote. Raises UserError if it was damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or choose another run.output_dir") from error


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': [1]}} -> {'a.b.0': 1}; empty tables and lists are kept as values."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    flat = {k: v for key, value in items for k, v in flatten(value, f"{prefix}{key}.").items()}
    return flat if flat or not prefix else {prefix[:-1]: tree}


def tree(config: Config) -> dict[str, Any]:
    """The resolved config as a plain tree of TOML values, optional keys without a value left out."""
    return config.model_dump(exclude_none=True, mode="json")


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {override!r}: write it as table.key=VALUE, for example --set run.seed=3")
    remove = not text.strip()
    try:
        value = None if remove else tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    *tables, last = key.strip().split(".")
    node: Any = tree
    for part in tables:
        node = _child(node, part, override)
    if isinstance(node, list):
        _child(node, last, override)
        node[int(last)] = value
    elif remove:
        node.pop(last, None)
    else:
        node[last] = value


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, dict):
        child = node.setdefault(part, {})
        if not isinstance(child, (dict, list)):
            raise UserError(f"--set {override!r}: {part!r} is a value, not a table")
        return child
    if not part.isdigit() or int(part) >= len(node):
        raise UserError(f"--set {override!r}: {part!r} is not an index into a list of {len(node)}")
    return node[int(part)]


def _explain(item: Any) -> str:
    """One pydantic error as one line: full key, value, remedy."""
    key = ".".join(str(part) for part in item["loc"] if not _is_union_tag(str(part)))
    if item["type"] == "extra_forbidden":
        meant = near_miss(key)
        return f"unknown key {key}" + (f"; did you mean {meant}?" if meant else "; see configs/ for the keys there are")
    if item["type"] == "missing":
        return f"{key} is required"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and isinstance(item["input"], dict):  # of a table: it names the keys itself
        return message
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _is_union_tag(part: str) -> bool:
    # pydantic names the tried member of a union in the location: 'bool', 'constrained-int', "literal['auto']", ...
    return part in ("bool", "int", "float", "str") or "[" in part or part.startswith("constrained-") or "(" in part


def near_miss(key: str) -> str | None:
    """The known key that `key` was probably meant to be, or None."""
    table, _, leaf = key.rpartition(".")
    known = list(known_keys())
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == generic(table)}
    close = difflib.get_close_matches(leaf, list(siblings), n=1, cutoff=0.6)
    if close:
        return f"{table}.{close[0]}" if table else close[0]
    # The right key in the wrong table, or a misspelt table.
    by_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    close = by_leaf[:1] or difflib.get_close_matches(generic(key), known, n=1, cutoff=0.75)
    return close[0] if close else None


def generic(key: str) -> str:
    """`key` with list items and component names written as '*'."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    if parts[:2] == ["model", "components"] and len(parts) > 2:
        parts[2] = "*"
    return ".".join(parts)


def known_keys(table: type[Table] | None = None, prefix: str = "") -> dict[str, Any]:
    """Every key of the contract (or of one table in it), as `generic` writes it, and its default."""
    keys = {}
    for name, field in (table or Config).model_fields.items():
        keys[prefix + name] = field.default
        for nested in _tables_in(field.annotation):
            repeated = nested is not field.annotation
            keys |= known_keys(nested, f"{prefix}{name}." + ("*." if repeated else ""))
    return keys


def _tables_in(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]

"""Uploads a folder of adapter files, README.md and pictures to the Hugging Face hub (`scripts/adapter.py push`).
huggingface_hub finds the token (HF_TOKEN, or of `hf auth login`)."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.adapters.peft_config import CONFIG, WEIGHTS
from trainer.adapters.portable import is_finite
from trainer.base.errors import NonFiniteError, UserError, one_line
from trainer.base.progress import QUIET, Phases
from workbench.adapter_files.opening import NamedModel, open_adapter
from workbench.hub.hub import git_blob, transport_error

CARD = "README.md"


@dataclass(frozen=True)
class PushResult:
    """The result of a push. url: of the repository. commit: the new one, or the newest if the files were there already.
    visibility: "private" or "public"."""

    url: str
    commit: str
    files: tuple[str, ...]
    visibility: str


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a folder to send, by path in the repository. Raises UserError if there is no adapter file."""
    adapters = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob(f"*/{WEIGHTS}"))]
    if not adapters:
        raise UserError(f"{folder} has no .safetensors file; give the folder with a run's adapter files")
    configs = [path.with_name(CONFIG) for path in adapters if path.name == WEIGHTS]
    others = [*configs, *folder.glob(CARD), *sorted(folder.glob("images/*.png"))]
    return {path.relative_to(folder).as_posix(): path for path in (*adapters, *others)}


def check(path: Path, models: list[NamedModel] | None, family: str | None, phases: Phases = QUIET) -> None:
    """Raises UserError for a file that is no adapter (so that nothing else leaves this machine) or changes nothing, and
    NonFiniteError for a number that is not finite. models, family: of `open_adapter`."""
    try:
        layers = open_adapter(path, models, family=family).portable.layers
    except UserError as error:
        reason = "push sends adapter files, so each one in the folder has to be one"
        raise UserError(f"{error}\nnothing was sent: {reason}") from error
    changes = False
    with phases(f"checking {path.name}", total=len(layers), unit="layer") as phase:
        for name, factors in layers.items():
            for kind, tensor in factors.tensors().items():
                if not is_finite(tensor.make()):
                    raise NonFiniteError(f"{path}: {kind} of {name} is not finite; nothing was sent")
            changes = changes or (factors.changes() and (bool(factors.matrices) or bool(factors.a.make().any())))
            phase.advance(1)
    if not changes:
        raise UserError(f"{path}: every B (or A) is zero, so it changes nothing; nothing was sent")


def push(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    replace_card: bool = False,
    models: list[NamedModel] | None = None,
    family: str | None = None,
    phases: Phases = QUIET,
) -> PushResult:
    """Send the folder's files to the hub in one commit. A missing repository is created, private unless `public`.
    replace_card: another README.md there may be replaced; without it that raises UserError, as does a refusal by the hub.
    Raises what `check` raises before anything is sent."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    files = files_of(folder)
    for path in files.values():
        if path.suffix == ".safetensors":
            check(path, models, family, phases)
    api, created = HfApi(), False
    try:
        missing = not api.repo_exists(repository)
        url = api.create_repo(repository, private=not public, exist_ok=True)
        created = missing
        if CARD in files and not replace_card and not created:
            _keep_card(api, url.repo_id, files[CARD])
        private = api.model_info(url.repo_id).private
        commit = api.create_commit(
            url.repo_id,
            operations=[CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()],
            commit_message="Upload adapter files",
        )
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(f"--repo {repository!r} is no name of a repository, which is USER/NAME: {error}") from error
    except (OSError, ValueError, RuntimeError, transport_error()) as error:
        # ValueError: the card's header. RuntimeError: wraps the error of a file.
        cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
        if getattr(cause, "errno", None) is not None and getattr(cause, "response", None) is None:
            raise cause from None
        empty = f"\nthe repository {repository!r} was made, and is empty" if created else ""
        raise UserError(f"{repository!r} could not be pushed to: {_reason(cause)}{empty}") from error
    return PushResult(str(url), commit.oid, tuple(files), "private" if private else "public")


def _keep_card(api: Any, repository: str, card: Path) -> None:
    data = card.read_bytes()
    blob = git_blob(len(data))
    blob.update(data)
    if any(info.blob_id != blob.hexdigest() for info in api.get_paths_info(repository, [CARD])):
        other = f"{repository!r} has another {CARD} than {card}, perhaps edited there; nothing was sent"
        raise UserError(f"{other}. --replace_card replaces it, and without {CARD} in the folder it stays")


def _reason(error: Exception) -> str:
    """The error's cause as text, with a remedy if there is one."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if status == 401:
        return "the hub does not know who asks; log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    if status in (403, 404):
        return f"the token may not write there ({status}); take one with write access, and a name under your own account"
    return one_line(error)

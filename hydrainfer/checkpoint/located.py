"""The location of a named model: the built-in one, a directory, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydrainfer import builtin
from hydrainfer.checkpoint.files import require
from hydrainfer.checkpoint.gguf import WEIGHT_FILE, unpack
from hydrainfer.checkpoint.weights import weight_files
from hydrainfer.config import ServeConfig
from hydrainfer.config.shipped import here_or_shipped, shipped
from hydrainfer.core import CheckpointError, ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_DESCRIBING = ["config.json", "*processor_config.json", "params.json", "adapter_config.json"]
_NOT_WANTED = ["consolidated*", "*/*.json", "*/*.safetensors"]  # the same weights in other programs' formats


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `owner/name`, and is neither a local path nor a GGUF file."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists() and not model.endswith(".gguf")


def locate(model: str, *, revision: str | None = None, mmproj: str | None = None) -> Path:
    """The checkpoint directory of `model`. For a directory or `builtin`, the directory itself. For a GGUF file, a
    directory made of it, with the vision weights in the file `mmproj`. For a name on the hub, the snapshot of
    `revision`, from the Hugging Face cache or, if it is not there and there is a network, from the hub. Raises
    `CheckpointError` in one line."""
    path = builtin.MODEL if model == builtin.NAME else Path(model).expanduser()
    is_file = path.suffix == ".gguf" or path.is_file()
    require(mmproj is None or is_file, path, "takes no --mmproj, which is for GGUF files")
    by_name = is_hub_name(model)
    require(revision is None or by_name, path, "takes no --revision, which is for names on the Hugging Face hub")
    if is_file:
        require(path.suffix != ".safetensors", path, "is one file of a checkpoint; pass the directory that it is in")
        return unpack(path, None if mmproj is None else Path(mmproj).expanduser())
    return _snapshot(model, revision) if by_name else path


def locate_description(model: str, *, revision: str | None = None) -> Path:
    """As `locate_model`, but of a name on the hub only the files that describe the model are fetched, a few KiB. Raises
    `ConfigError` or `CheckpointError`."""
    if not is_hub_name(model):
        return locate_model(model)
    return _snapshot(model, revision, _DESCRIBING, _is_described)


def locate_model(name: str) -> Path:
    """The directory of a checkpoint, or of a configuration without weights that is shipped in configs/models. Raises
    `ConfigError`, which names the shipped ones, or `CheckpointError`."""
    path = here_or_shipped(Path(name))
    found = {p.parent.name: p.parent for p in sorted(shipped("configs").glob("models/*/config.json"))}
    if name == builtin.NAME or path.is_file() or is_hub_name(name):
        return locate(name)
    if not path.is_dir() and name not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"no model {name!r}: give a checkpoint, {builtin.NAME}, or one of {known}", param="model")
    return path if path.is_dir() else found[name]


def name_of(path: Path) -> str:
    """The name of the model in a checkpoint directory. In the Hugging Face cache this is not the directory's name."""
    path = path.expanduser().resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def _is_whole(path: Path) -> bool:
    """Whether a snapshot has all files that every checkpoint needs. A download that was cut off leaves some out."""
    try:
        weight_files(path)
    except CheckpointError:
        return False
    return all((path / name).is_file() for name in ("config.json", "tokenizer.json"))


def _is_described(path: Path) -> bool:
    return (path / "config.json").is_file() or describes_otherwise(path) is not None


def describes_otherwise(path: Path) -> str | None:
    """What a directory without config.json holds instead of a checkpoint, and what to take; None if that is not
    known."""
    if (path / "params.json").is_file():
        return "holds Mistral's params.json and no config.json; take a repository that has both"
    return _otherwise([p.name for p in path.iterdir()])


def _otherwise(names: Sequence[str]) -> str | None:
    if "adapter_config.json" in names:
        return "holds a LoRA adapter, which is not served; merge it into its model, and serve that"
    by_ending = {ending: [name for name in names if name.endswith(ending)] for ending in (".gguf", ".onnx")}
    if by_ending[".gguf"]:
        return f"holds GGUF files and no config.json; name one of them, e.g. {min(by_ending['.gguf'])}"
    if by_ending[".onnx"]:
        return "holds ONNX files, which are not served; take the repository that they were made from"
    return None


def _lacks(model: str, revision: str | None) -> str:
    """Why a snapshot that could be fetched is no checkpoint."""
    from huggingface_hub import list_repo_files

    with suppress(Exception):
        names = list_repo_files(model, revision=revision)
        if "config.json" not in names and (other := _otherwise(names)) is not None:
            return f"it {other}"
    return "it lacks config.json, tokenizer.json or safetensors"


def _snapshot(
    model: str,
    revision: str | None,
    wanted: Sequence[str] = _WANTED,
    suffices: Callable[[Path], bool] = _is_whole,
) -> Path:
    """The snapshot of a model on the hub, with the files `wanted`, if it `suffices`. Raises `CheckpointError`, which
    says how to download the model."""
    from huggingface_hub import constants, snapshot_download

    def find(*, local: bool) -> Path | None:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=_NOT_WANTED,
            local_files_only=local,
        )
        return Path(found) if suffices(Path(found)) else None

    with suppress(Exception):  # missing or damaged; a download may correct that
        if (found := find(local=True)) is not None:
            return found
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    try:
        if not why and (found := find(local=False)) is not None:
            return found
        why = why or _lacks(model, revision)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as e:  # errors of huggingface_hub and of three libraries that it uses
        why = _reason(e)
    at = f" --revision {shlex.quote(revision)}" if revision else ""
    raise CheckpointError(
        f"{model} is no directory, and not in the Hugging Face cache ({constants.HF_HUB_CACHE}); it was not fetched: "
        f"{why}. Where there is a network: hf download {model}{at}"
    )


def _reason(e: Exception) -> str:
    kinds = [kind.__name__ for kind in type(e).__mro__]
    if "GatedRepoError" in kinds:
        return "its owner wants you to ask for it on the hub first, and then `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return "the hub has no such revision of it"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has no model of that name, or not for you (`hf auth login`)"
    if any(kind in kinds for kind in ("LocalEntryNotFoundError", "ConnectError", "ConnectionError", "TransportError")):
        return "the hub cannot be reached"
    return " ".join(str(e).split())[:160] or type(e).__name__


def has_weights(path: Path) -> bool:
    """Whether a checkpoint directory holds more than a configuration."""
    return any(path.glob("*.safetensors")) or (path / WEIGHT_FILE).exists()


def model_folder(config: ServeConfig) -> Path:
    """The checkpoint directory of a configuration, found in the same way in every process that has it. Raises
    `CheckpointError`."""
    return locate(config.model, revision=config.revision, mmproj=config.mmproj)

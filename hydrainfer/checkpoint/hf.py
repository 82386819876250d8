"""config.json as transformers reads it, with the defaults of missing fields."""

from __future__ import annotations

import sys
from importlib.abc import SourceLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from hydrainfer.core import CheckpointError

_VALIDATORS, _ACTIVATIONS = "transformers.utils.type_validators", "transformers.activations"
_IMPORT = "from ..activations import ACT2FN"


def hf_config(path: Path) -> Any:
    """The configuration of a checkpoint directory, as an object of transformers. Raises `CheckpointError`, one line."""
    import transformers

    _import_validators()
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # huggingface_hub's strict dataclasses raise their own types
        first = " ".join(str(e).split())[:200] or type(e).__name__
        raise CheckpointError(f"{path}: config.json is not valid: {first}") from None


def _import_validators() -> None:
    """Import the validators of transformers' configurations without the module of activation functions.

    Llama's configuration imports the validators. One of them compares names with the table of activations, whose module
    imports torch's compiler and sympy, which costs each server 75 MB and two seconds. With an empty table, as if torch
    were missing, that validator accepts every name; `text_config` and the vision towers check the names themselves. If
    this fails, transformers imports them in its own way.
    """
    if _VALIDATORS in sys.modules or _ACTIVATIONS in sys.modules:
        return
    try:
        spec = find_spec(_VALIDATORS)
        assert spec is not None and isinstance(spec.loader, SourceLoader)
        source = spec.loader.get_source(_VALIDATORS)
        assert source is not None and _IMPORT in source
        module = module_from_spec(spec)
        exec(compile(source.replace(_IMPORT, "ACT2FN = {}"), spec.origin or "", "exec"), module.__dict__)
    except Exception:  # of any kind, because transformers may change in any way
        return
    sys.modules.setdefault(_VALIDATORS, module)  # only now, because other threads may import it too

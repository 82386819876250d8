"""What the tests need of a family of models. Every other module of this folder that is no test offers `SAMPLES`:
samples by name. The tests of tokens (`tests/equivalence/test_families.py`), logits and placeholders run over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

SEEING = ("1EPD", "1EP1D", "1ED1P", "1E1P1D")
SPEAKING = ("1EPD", "1P1D")


class Sample(NamedTuple):
    """A kind of checkpoints. `make(folder, **variant)` writes a tiny one and returns its path; `reference(path)` is
    transformers on it, with `inputs` and `greedy` as `tests.equivalence.reference.Reference` has them. `chats`: what is
    asked, by name; `layouts`: those in which tokens are compared. `variants`: the arguments of `make` with which logits
    are compared, by name. `compiled`: tokens are also compared with our compiled kernels. `expanded(path)`: a function
    that returns the ids that the reference's preprocessing puts in a prompt for a picture of this width and height,
    with the texts around it that the processor writes, or None if it refuses such a picture; None instead of the
    function if the model takes text only. `sizes`: widths and heights for that, besides random ones."""

    make: Callable[..., Path]
    reference: Callable[[Path], Any]
    chats: Mapping[str, list[dict]]
    layouts: tuple[str, ...]
    variants: Mapping[str, Mapping[str, Any]] = {"": {}}
    compiled: bool = False
    expanded: Callable[[Path], Callable[[int, int], list[int] | None]] | None = None
    sizes: Sequence[tuple[int, int]] = ((1, 1), (1, 40), (40, 1), (2000, 20), (20, 2000))


def samples() -> dict[str, Sample]:
    """All samples by name."""
    here = Path(__file__).parent
    names = [m.name for m in iter_modules([str(here)]) if not m.name.startswith("test_")]
    modules = [import_module(f"tests.families.{name}") for name in names if name not in ("sample", "chats")]
    return {name: sample for module in modules for name, sample in module.SAMPLES.items()}

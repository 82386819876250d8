"""HydraInfer serves vision-language models by encode-prefill-decode disaggregation.

`from hydrainfer import LLM, SamplingParams` for offline use, `hydrainfer serve` for the API. See docs/tour.md.
"""

from typing import TYPE_CHECKING, Any

from hydrainfer.core import SamplingParams
from hydrainfer.version import __version__

if TYPE_CHECKING:
    from hydrainfer.offline import LLM


__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use, because it imports torch
        from hydrainfer.offline import LLM

        return LLM
    raise AttributeError(f"module 'hydrainfer' has no attribute {name!r}")

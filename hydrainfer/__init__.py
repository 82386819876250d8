"""HydraInfer serves vision-language models by encode-prefill-decode disaggregation.

`from hydrainfer import LLM, SamplingParams` for offline use, `hydrainfer serve` for the API. See docs/tour.md.
"""

from typing import TYPE_CHECKING, Any

from hydrainfer.core import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    HydraError,
    InvalidRequest,
    MediaError,
    Unavailable,
)
from hydrainfer.offline import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    ToolCall,
)
from hydrainfer.version import __version__

if TYPE_CHECKING:
    from hydrainfer.offline import LLM, AsyncLLM


__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeadlineExceeded",
    "HydraError",
    "InvalidRequest",
    "MediaError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "Unavailable",
    "__version__",
]


_OF_VLLM = {
    **dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), "LLM(...) and AsyncLLM(...) take the options themselves"),
    **dict.fromkeys(("LLMEngine", "AsyncLLMEngine"), "take AsyncLLM"),
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput"), "models generate text; embeddings are not served"),
    "BeamSearchParams": "beam search is not supported; sample several choices (n)",
}


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM"):  # imported on first use, because they import torch
        from hydrainfer import offline

        return getattr(offline, name)
    if name in _OF_VLLM:
        raise ImportError(f"{name} is vLLM's and not to be had here: {_OF_VLLM[name]}")
    raise AttributeError(f"module 'hydrainfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

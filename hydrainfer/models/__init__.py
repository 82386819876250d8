"""Model definitions, and loading of the weights a role needs from a Hugging Face checkpoint directory.

Called by assemble (loading) and runtime (encode, embed, forward, logits). Never knows requests, scheduling or blocks'
owners. A new architecture is one entry in `families.FAMILIES`.
"""

from hydrainfer.models.config import ModelConfig, Rope, TextConfig, VisionConfig
from hydrainfer.models.families import FAMILIES, read_config
from hydrainfer.models.fingerprint import vision_fingerprint
from hydrainfer.models.llama import LastRows
from hydrainfer.models.load import DTYPES, load_model
from hydrainfer.models.model import Model, cache_specs

__all__ = [
    "DTYPES",
    "FAMILIES",
    "LastRows",
    "Model",
    "ModelConfig",
    "Rope",
    "TextConfig",
    "VisionConfig",
    "cache_specs",
    "load_model",
    "read_config",
    "vision_fingerprint",
]

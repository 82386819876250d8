"""Model definitions, and loading of the weights a role needs from a Hugging Face checkpoint directory.

Called by assemble (loading) and runtime (encode, embed, forward, logits). Never knows requests, scheduling or blocks'
owners. A new architecture is an entry in `families.FAMILIES` and a file.
"""

from hydrainfer.models.config import AnyresConfig, ClipConfig, ModelConfig, Rope, TextConfig
from hydrainfer.models.families import FAMILIES, ParsedConfig, parse_config, read_config
from hydrainfer.models.fingerprint import vision_fingerprint
from hydrainfer.models.llama import DeepRows, LastRows
from hydrainfer.models.load import DTYPES, load_model
from hydrainfer.models.model import Model, cache_specs
from hydrainfer.models.picture import Picture, VisionTower

__all__ = [
    "DTYPES",
    "FAMILIES",
    "AnyresConfig",
    "ClipConfig",
    "DeepRows",
    "LastRows",
    "Model",
    "ModelConfig",
    "ParsedConfig",
    "Picture",
    "Rope",
    "TextConfig",
    "VisionTower",
    "cache_specs",
    "load_model",
    "parse_config",
    "read_config",
    "vision_fingerprint",
]

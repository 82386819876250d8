"""The location of a checkpoint and its configuration files, read and checked once: model, preprocessing, and the table
of supported families.

Called by models, processor, planner and assemble. Never imports torch, never reads weights or a tokenizer's vocabulary.
"""

from hydrainfer.checkpoint.clip import AnyresConfig, ClipConfig
from hydrainfer.checkpoint.decoder import Decoder, Rope, TextConfig
from hydrainfer.checkpoint.experts import Experts
from hydrainfer.checkpoint.families import (
    FAMILIES,
    Family,
    ParsedConfig,
    architecture_of,
    family_of,
    parse_config,
    read_config,
)
from hydrainfer.checkpoint.files import find_json, preprocessing, read_json, require
from hydrainfer.checkpoint.gemma import SiglipConfig
from hydrainfer.checkpoint.lfm3 import Lfm3VisionConfig
from hydrainfer.checkpoint.located import has_weights, is_hub_name, locate, locate_model, model_folder, name_of
from hydrainfer.checkpoint.model import Fit, ModelConfig, VisionConfig, VisionShape
from hydrainfer.checkpoint.pixels import (
    ClipSettings,
    PixelBackend,
    PixelBounds,
    PixelSettings,
    QwenSettings,
    QwenVideoSettings,
)
from hydrainfer.checkpoint.qwen import MAX_ASPECT, FramesConfig, QwenVisionConfig
from hydrainfer.checkpoint.recurrence import Recurrence
from hydrainfer.checkpoint.weights import weight_files

__all__ = [
    "FAMILIES",
    "MAX_ASPECT",
    "AnyresConfig",
    "ClipConfig",
    "ClipSettings",
    "Decoder",
    "Experts",
    "Family",
    "Fit",
    "FramesConfig",
    "Lfm3VisionConfig",
    "ModelConfig",
    "ParsedConfig",
    "PixelBackend",
    "PixelBounds",
    "PixelSettings",
    "QwenSettings",
    "QwenVideoSettings",
    "QwenVisionConfig",
    "Recurrence",
    "Rope",
    "SiglipConfig",
    "TextConfig",
    "VisionConfig",
    "VisionShape",
    "architecture_of",
    "family_of",
    "find_json",
    "has_weights",
    "is_hub_name",
    "locate",
    "locate_model",
    "model_folder",
    "name_of",
    "parse_config",
    "preprocessing",
    "read_config",
    "read_json",
    "require",
    "weight_files",
]

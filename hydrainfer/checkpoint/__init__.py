"""The location of a checkpoint and its configuration files, read and checked once: model and preprocessing.

Called by families, models, processor, planner and assemble. Never imports torch, never reads weights or a tokenizer's
vocabulary.
"""

from hydrainfer.checkpoint.decoder import Decoder, TextConfig, text_config
from hydrainfer.checkpoint.experts import Experts
from hydrainfer.checkpoint.family import TEXT, Family, Names, Served, VideoMark, text_only
from hydrainfer.checkpoint.files import check_fields, find_json, preprocessing, read_json, require
from hydrainfer.checkpoint.fp8 import Fp8, fp8_of
from hydrainfer.checkpoint.hf import hf_config
from hydrainfer.checkpoint.located import (
    describes_otherwise,
    has_weights,
    is_hub_name,
    locate,
    locate_description,
    locate_model,
    model_folder,
    name_of,
)
from hydrainfer.checkpoint.model import ACTIVATIONS, REFERENCE, Fit, ModelConfig, VisionConfig, VisionShape
from hydrainfer.checkpoint.pixels import (
    BUDGETS,
    DEFAULT_BACKEND,
    GLM_BOUNDS,
    MAX_ASPECT,
    BudgetSettings,
    ClipSettings,
    IdeficsSettings,
    PixelBackend,
    PixelBounds,
    PixelSettings,
    PixtralSettings,
    QwenSettings,
    TileSettings,
    square_side,
    stated,
)
from hydrainfer.checkpoint.recurrence import Recurrence
from hydrainfer.checkpoint.rope import Rope
from hydrainfer.checkpoint.tower import Activation, Gate, Matrix, Merge, Norm, Pool, Steps, TowerConfig
from hydrainfer.checkpoint.videos import (
    BudgetVideoSettings,
    FrameTimes,
    GlmVideoSettings,
    QwenVideoSettings,
    SmolVideoSettings,
    SquareVideoSettings,
)
from hydrainfer.checkpoint.weights import weight_files

__all__ = [
    "ACTIVATIONS",
    "BUDGETS",
    "DEFAULT_BACKEND",
    "GLM_BOUNDS",
    "MAX_ASPECT",
    "REFERENCE",
    "TEXT",
    "Activation",
    "BudgetSettings",
    "BudgetVideoSettings",
    "ClipSettings",
    "Decoder",
    "Experts",
    "Family",
    "Fit",
    "Fp8",
    "FrameTimes",
    "Gate",
    "GlmVideoSettings",
    "IdeficsSettings",
    "Matrix",
    "Merge",
    "ModelConfig",
    "Names",
    "Norm",
    "PixelBackend",
    "PixelBounds",
    "PixelSettings",
    "PixtralSettings",
    "Pool",
    "QwenSettings",
    "QwenVideoSettings",
    "Recurrence",
    "Rope",
    "Served",
    "SmolVideoSettings",
    "SquareVideoSettings",
    "Steps",
    "TextConfig",
    "TileSettings",
    "TowerConfig",
    "VideoMark",
    "VisionConfig",
    "VisionShape",
    "check_fields",
    "describes_otherwise",
    "find_json",
    "fp8_of",
    "has_weights",
    "hf_config",
    "is_hub_name",
    "locate",
    "locate_description",
    "locate_model",
    "model_folder",
    "name_of",
    "preprocessing",
    "read_json",
    "require",
    "square_side",
    "stated",
    "text_config",
    "text_only",
    "weight_files",
]

"""Model definitions, and loading of the weights a role needs from a Hugging Face checkpoint directory.

Called by assemble (loading) and runtime (encode, embed, forward, logits). Knows nothing of requests, scheduling or
block ownership. `families` names the vision tower of each model.
"""

from hydrainfer.models.decoder import Decoder
from hydrainfer.models.fingerprint import fingerprint, whole_fingerprint
from hydrainfer.models.load import DTYPES, holds_mtp, load_model
from hydrainfer.models.model import Model, attentions_of, cache_specs
from hydrainfer.models.passes import DeepRows, LastRows, LayerCache
from hydrainfer.models.picture import Bucket, Passes, PassSize, PatchedPicture, VisionTower, tower_of

__all__ = [
    "DTYPES",
    "Bucket",
    "Decoder",
    "DeepRows",
    "LastRows",
    "LayerCache",
    "Model",
    "PassSize",
    "Passes",
    "PatchedPicture",
    "VisionTower",
    "attentions_of",
    "cache_specs",
    "fingerprint",
    "holds_mtp",
    "load_model",
    "tower_of",
    "whole_fingerprint",
]

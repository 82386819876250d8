"""Model definitions, and loading of the weights a role needs from a Hugging Face checkpoint directory.

Called by assemble (loading) and runtime (encode, embed, forward, logits). Knows nothing of requests, scheduling or
block ownership. A new architecture is an entry in `checkpoint.FAMILIES` and a file that offers `Layers`.
"""

from hydrainfer.models.decoder import Decoder, DeepRows, LastRows, LayerCache
from hydrainfer.models.fingerprint import fingerprint, whole_fingerprint
from hydrainfer.models.layers import Layers, layers_of
from hydrainfer.models.load import DTYPES, holds_mtp, load_model
from hydrainfer.models.model import Model, attentions_of, cache_specs
from hydrainfer.models.picture import Bucket, Passes, PassSize, PatchedPicture, VisionTower

__all__ = [
    "DTYPES",
    "Bucket",
    "Decoder",
    "DeepRows",
    "LastRows",
    "LayerCache",
    "Layers",
    "Model",
    "PassSize",
    "Passes",
    "PatchedPicture",
    "VisionTower",
    "attentions_of",
    "cache_specs",
    "fingerprint",
    "holds_mtp",
    "layers_of",
    "load_model",
    "whole_fingerprint",
]

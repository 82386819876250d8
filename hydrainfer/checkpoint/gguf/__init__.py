"""GGUF files, llama.cpp's format. The metadata of a file becomes the JSON files of a checkpoint directory; the weights
stay in the file.

Called by `checkpoint.locate` and, for the table of tensors, by models.
"""

from hydrainfer.checkpoint.gguf.file import read_gguf
from hydrainfer.checkpoint.gguf.folder import VISION_FILE, WEIGHT_FILE, unpack
from hydrainfer.checkpoint.gguf.names import HeldTensor, tensors_of

__all__ = [
    "VISION_FILE",
    "WEIGHT_FILE",
    "HeldTensor",
    "read_gguf",
    "tensors_of",
    "unpack",
]

"""The pixels of transformers' torchvision processors, made in a process of their own. Where torchvision can be
imported, transformers chooses other processors for everybody.

    python -m tests.processor.pictures.torchvision_reference FOLDER CASES.json PICTURES.npz RESULTS.npz

FOLDER: where `make torchvision` has put the package. CASES: the class and the options of a processor, by name, and true
if it is asked for the frames that it chooses. Each case is run on all pictures, or on all videos if it takes these.
Results are float32 as the processor returns them, by "case|picture". An array of four numbers is a video of which only
the frames are chosen: how many it has, its rate, and the number or the rate wanted, the other 0.
"""

from __future__ import annotations

import json
import sys
from pkgutil import resolve_name

import numpy as np
import torch
from PIL import Image

_OPERATORS = ("nms", "qnms")  # a build for CUDA refers to them, and does not have them on a CPU


def add_torchvision(folder: str) -> torch.library.Library:
    """Make torchvision importable in this process, for as long as what is returned is kept."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(folder)
    return library


def main(folder: str, cases: str, pictures: str, results: str) -> None:
    library = add_torchvision(folder)  # noqa: F841
    from transformers.video_processing_utils import BaseVideoProcessor
    from transformers.video_utils import VideoMetadata

    found = {}
    with open(cases) as file, np.load(pictures) as arrays:
        for case, (name, options, *chooses) in json.load(file).items():
            processor = resolve_name(name)(**options)
            takes_videos = isinstance(processor, BaseVideoProcessor)
            assert takes_videos or processor.backend == "torchvision"
            for key, array in arrays.items():
                if takes_videos and array.ndim == 4:
                    made = processor(array.transpose(0, 3, 1, 2), return_tensors="pt")["pixel_values_videos"]
                elif array.ndim == 1 and chooses:
                    n, rate, *wanted = array.tolist()
                    asked = {name: value for name, value in zip(("num_frames", "fps"), wanted) if value}
                    facts = VideoMetadata(total_num_frames=int(n), fps=rate)
                    made = torch.tensor([*processor.sample_frames(facts, **asked)])
                elif array.ndim == 3 and not takes_videos:
                    made = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
                else:
                    continue
                found[f"{case}|{key}"] = made.numpy()
    np.savez(results, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Prompts and pixels of GLM's videos by transformers' processors, which need torchvision; in a process of its own.

    python -m tests.processor.pictures.glm_reference FOLDER TOKENIZER CASES.json RESULTS.json PIXELS.npz

FOLDER: where `make torchvision` has put the package. CASES: videos as `Clip`s, of which only the frames are
chosen, and videos that become prompts; all are given to both samplers.
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import numpy as np

from tests.processor.pictures.torchvision_reference import add_torchvision

NAMES = {"glm4v": "Glm4v", "glm46v": "Glm46V"}
SIZE = {"shortest_edge": 8 * 28 * 28, "longest_edge": 300 * 28 * 28}
PROMPT = "<|begin_of_video|><|video|><|end_of_video|>"


class Clip(NamedTuple):
    """A video of noise. `sampled`: its frames are already those that the model is to see."""

    n: int
    fps: float
    width: int = 8
    height: int = 8
    sampled: bool = False

    def frames(self) -> np.ndarray:
        """uint8 [n, height, width, 3]."""
        return np.random.default_rng(self.n).integers(0, 256, (self.n, self.height, self.width, 3), np.uint8)


def main(folder: str, tokenizer: str, cases: str, results: str, pixels: str) -> None:
    library = add_torchvision(folder)  # noqa: F841
    import transformers
    from transformers.video_utils import VideoMetadata

    text = transformers.AutoTokenizer.from_pretrained(tokenizer)
    found, arrays = {}, {}
    with open(cases) as file:
        given = json.load(file)
    for sampler, name in NAMES.items():
        videos = getattr(transformers, f"{name}VideoProcessor")(size=SIZE)
        pictures = getattr(transformers, f"{name}ImageProcessor")()
        processor = getattr(transformers, f"{name}Processor")(pictures, text, videos)
        chosen = [videos.sample_frames(facts(Clip(*clip), VideoMetadata)).tolist() for clip in given["chosen"]]
        prompts = []
        for i, clip in enumerate(Clip(*clip) for clip in given["shown"]):
            frames = clip.frames().transpose(0, 3, 1, 2)
            options = {"do_sample_frames": not clip.sampled, "video_metadata": [facts(clip, VideoMetadata)]}
            made = processor(text=PROMPT, videos=[frames], return_tensors="pt", **options)
            prompts.append(text.decode(made["input_ids"][0]))
            arrays[f"{sampler}|{i}"] = made["pixel_values_videos"].numpy()
        found[sampler] = {"chosen": chosen, "prompts": prompts}
    with open(results, "w") as file:
        json.dump(found, file)
    np.savez(pixels, **arrays)


def facts(clip: Clip, kind: type) -> object:
    """The metadata of a video, as transformers has it."""
    indices = list(range(clip.n)) if clip.sampled else None
    return kind(total_num_frames=clip.n, fps=clip.fps, duration=clip.n / clip.fps, frames_indices=indices)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Prompts and pixels of SmolVLM2's videos by transformers' processor, which needs torchvision; in a process of its own.

    python -m tests.processor.pictures.smol_reference FOLDER CASES.json RESULTS.json PIXELS.npz

FOLDER: where `make torchvision` has put the package. CASES: checkpoints by name, videos as `Clip`s of which only the
frames are chosen, videos that become prompts, the texts around these, and numbers in words.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tests.processor.pictures.glm_reference import Clip, facts
from tests.processor.pictures.torchvision_reference import add_torchvision


def main(folder: str, cases: str, results: str, pixels: str) -> None:
    library = add_torchvision(folder)  # noqa: F841
    import transformers
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.video_utils import VideoMetadata

    found, arrays = {}, {}
    with open(cases) as file:
        given = json.load(file)
    processing_smolvlm.num2words = lambda n: given["words"][str(n)]
    for name, path in given["checkpoints"].items():
        processor = transformers.AutoProcessor.from_pretrained(path)
        videos = processor.video_processor
        chosen = [videos.sample_frames(facts(Clip(*clip), VideoMetadata)).tolist() for clip in given["chosen"]]
        prompts = []
        for i, clip in enumerate(Clip(*clip) for clip in given["shown"]):
            options = {"video_metadata": [facts(clip, VideoMetadata)]} | (
                {"do_sample_frames": False} if clip.sampled else {}
            )
            made = processor.apply_chat_template(
                chat(clip, *given["texts"][i % len(given["texts"])]),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs=options,
            )
            prompts.append(made["input_ids"][0].tolist())
            arrays[f"{name}|{i}"] = made["pixel_values"][0].numpy()
        found[name] = {"chosen": chosen, "prompts": prompts}
    with open(results, "w") as file:
        json.dump(found, file)
    np.savez(pixels, **arrays)


def chat(clip: Clip, before: str, after: str) -> list[dict]:
    """A question about a video, of all its frames, with these texts before and after it."""
    parts = [
        {"type": "text", "text": before},
        {"type": "video", "video": clip.frames()},
        {"type": "text", "text": after},
    ]
    return [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""From a training run to the checkpoint that ships: an ordinary Hugging Face directory in float16.

python -m training.builtin.export RUN hydrainfer/builtin/shapes-and-digits
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from training.builtin import tokenizer as own
from training.builtin.loop import weights
from training.builtin.model import CONTEXT, PATCH, SIDE
from training.builtin.train import blank


def export(run: Path, out: Path) -> None:
    """Raises if the tokenizer does not come out as it was in training."""
    tokenizer = own.of(run)
    model = blank(tokenizer)
    model.load_state_dict(weights(run, "model"))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False, max_length=CONTEXT
    )
    model.to(torch.float16).save_pretrained(out)
    pictures = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor = transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=own.TEMPLATE,
    )
    processor.save_pretrained(out)
    pictures.save_pretrained(out)
    _change(out / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"})
    _change(out / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}, drop=("is_local", "local_files_only"))
    again = transformers.AutoTokenizer.from_pretrained(out)
    probe = "USER: <image>\nIs there a red circle? ASSISTANT:"
    assert again(probe).input_ids == tokenizer(probe).input_ids


def _change(path: Path, entries: dict[str, str], drop: Sequence[str] = ()) -> None:
    """Into what every version of transformers reads."""
    saved = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop} | entries
    path.write_text(json.dumps(saved, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the checkpoint of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    export(a.run, a.out)
    files = sorted(a.out.iterdir())
    for f in files:
        print(f"{f.stat().st_size / 1e6:8.3f} MB  {f.name}")
    print(f"{sum(f.stat().st_size for f in files) / 1e6:8.3f} MB")


if __name__ == "__main__":
    main()

"""transformers end to end (its processor, its model) on the same checkpoint, photographs and messages."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from PIL import Image

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "camera.png", "rocket.jpg", "motorcycle_left.png")


def photo(name: str) -> Image.Image:
    """A real photograph that scikit-image ships; camera is grey, rocket and coffee are not square."""
    import skimage

    return Image.open(Path(skimage.__file__).parent / "data" / name)


class Reference:
    """`greedy(messages)` → prompt ids, answer ids, and per answer id the distance of the two best logits. `processor`
    is transformers' of text and pictures, or the tokenizer of a model that takes text only."""

    def __init__(self, path: Path, processor=transformers.LlavaProcessor, model=None) -> None:
        self.processor = processor.from_pretrained(path)
        template = path / "chat_template.jinja"
        self.template = template.read_text() if template.exists() else None
        kind = model or transformers.LlavaForConditionalGeneration
        self.model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        inputs = self.inputs(messages)
        out = self.model.generate(
            **inputs, max_new_tokens=n_new, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        n_prompt = inputs["input_ids"].shape[1]
        best = torch.cat(out.logits).float().topk(2, dim=-1).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        return inputs["input_ids"][0].tolist(), out.sequences[0, n_prompt:].tolist(), gaps

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        pictures = [part["image"] for m in messages for part in m["content"] if part["type"] == "image"]
        text = self.processor.apply_chat_template(messages, chat_template=self.template, add_generation_prompt=True)
        return self.processor(text=text, images=[p.convert("RGB") for p in pictures] or None, return_tensors="pt")


class TextReference(Reference):
    """Of a model that takes text only, whose template takes strings."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, transformers.AutoTokenizer, transformers.AutoModelForCausalLM)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        flat = [{"role": m["role"], "content": "\n".join(p["text"] for p in m["content"])} for m in messages]
        return self.processor.apply_chat_template(
            flat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

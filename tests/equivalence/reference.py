"""transformers end to end (its processor, its model) on the same checkpoint, photographs and messages. Pictures are
prepared with Pillow, as our `image_backend: pillow` prepares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.equivalence.criterion import ROUTED, ROUTER_GAP

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "camera.png", "rocket.jpg", "motorcycle_left.png")


def photo(name: str) -> Image.Image:
    """A real photograph that scikit-image ships; camera is grey, rocket and coffee are not square."""
    import skimage

    return Image.open(Path(skimage.__file__).parent / "data" / name)


@contextmanager
def choices(model) -> Iterator[Callable[[], list[float]]]:
    """Within it the model's routers are watched; then for each token that was computed, the least distance in any layer
    of the last expert that was chosen from the best other one. Empty without experts."""
    seen: dict[Any, list[torch.Tensor]] = {}

    def watch(router, _, out):
        scores = out[0].float()
        if hasattr(router, "e_score_correction_bias"):
            scores = scores.sigmoid() + router.e_score_correction_bias
        elif not hasattr(router, "bias") and not hasattr(router, "proj"):  # GPT-OSS chooses by scores, Gemma 4 gives
            scores = scores.softmax(-1)  # probabilities
        seen.setdefault(router, []).append(_gap(scores, router))

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith(("topkrouter", "textrouter"))]
    hooks = [m.register_forward_hook(watch) for m in routers]
    try:
        yield lambda: torch.stack([torch.cat(gaps) for gaps in seen.values()]).amin(0).tolist() if seen else []
    finally:
        for hook in hooks:
            hook.remove()


def _gap(scores: torch.Tensor, router) -> torch.Tensor:
    """[tokens]: by how much the choice of groups, and that of experts among them, was decided."""
    n_groups, least = getattr(router, "num_group", 1), torch.full(scores.shape[:1], torch.inf)
    if n_groups > 1:
        grouped = scores.unflatten(1, (n_groups, -1))
        of_groups = grouped.topk(2).values.sum(-1)
        best = of_groups.topk(router.topk_group + 1).values
        least = best[:, -2] - best[:, -1]
        kept = torch.zeros_like(of_groups).scatter_(1, of_groups.topk(router.topk_group).indices, 1.0)
        scores = grouped.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
    top_k = router.config.top_k_experts if hasattr(router, "proj") else router.top_k
    best = scores.topk(top_k + 1).values
    return torch.minimum(least, best[:, -2] - best[:, -1])


def generate(model, inputs: dict[str, torch.Tensor], n_new: int) -> tuple[list[int], list[int], list[float]]:
    """See `Reference`."""
    with choices(model) as gaps_of_experts:
        out = model.generate(
            **inputs, max_new_tokens=n_new, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    n_prompt = inputs["input_ids"].shape[1]
    best = torch.cat(out.logits).float().topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    close = next((i for i, gap in enumerate(gaps_of_experts()) if gap < ROUTER_GAP), n_prompt + n_new)
    gaps = [gap if n_prompt - 1 + i < close else ROUTED for i, gap in enumerate(gaps)]
    return inputs["input_ids"][0].tolist(), out.sequences[0, n_prompt:].tolist(), gaps


class Frames:
    """A processor of videos that prepares their frames as pictures, with Pillow: transformers' own needs torchvision.
    `pictures`: that of pictures, with these `options`."""

    def __init__(self, pictures, **options) -> None:
        self._pictures, self._options = pictures, options

    def __call__(self, videos, **_) -> dict[str, torch.Tensor]:
        made = [
            self._pictures([Image.fromarray(f) for f in video], return_tensors="pt", **self._options)["pixel_values"]
            for video in videos
        ]
        return {"pixel_values_videos": torch.stack(made)}


class Reference:
    """`greedy(messages)` → prompt ids, answer ids, and per answer id the distance of the two best logits. `processor`
    is transformers' of text and pictures, or the tokenizer of a model that takes text only."""

    def __init__(self, path: Path, processor=transformers.LlavaProcessor, model=None, backend="pil") -> None:
        options = {} if processor is transformers.AutoTokenizer else {"backend": backend}
        self.processor = processor.from_pretrained(path, **options)
        template = path / "chat_template.jinja"
        self.template = template.read_text() if template.exists() else None
        kind = model or transformers.LlavaForConditionalGeneration
        self.model = kind.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        return generate(self.model, self.inputs(messages), n_new)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        """The arguments that the model is called with."""
        parts = [part for m in messages for part in m["content"]]
        pictures = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        videos = [part["video"] for part in parts if part["type"] == "video"]
        text = self.processor.apply_chat_template(messages, chat_template=self.template, add_generation_prompt=True)
        given = {"videos": videos} if videos else {}
        return self.processor(text=text, images=pictures or None, return_tensors="pt", **given)


class TextReference(Reference):
    """The reference of a model that takes text only, whose template takes strings."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, transformers.AutoTokenizer, transformers.AutoModelForCausalLM)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        flat = [{"role": m["role"], "content": "\n".join(p["text"] for p in m["content"])} for m in messages]
        return self.processor.apply_chat_template(
            flat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

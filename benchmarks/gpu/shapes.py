"""Models of 7B shapes with weights drawn on the device: no checkpoint is read. In a dry run, tiny ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.tiny import tiny
from hydrainfer.checkpoint import ModelConfig
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import DTYPES, Model, attentions_of
from hydrainfer.ops import OpSet, select_ops
from hydrainfer.planner.costs import BatchShape
from tests.checkpoints import make_llava

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
VISION = {  # of LLaVA-1.5: CLIP ViT-L/14 at 336 pixels
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "projection_dim": 768,
}  # fmt: skip
TEXT = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32064,
}  # fmt: skip


def device_of(name: str) -> torch.device:
    """The device that an instance of a server uses."""
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


class Shape(NamedTuple):
    """A model to measure: pictures of `size` pixels, up to 16 of them, if it takes any; language batches that fit a GPU
    of 80 GB, `more` of which are not run beside pictures. `kind`: the tiny model of its family that takes its place in
    a dry run, one of `tiny.MAKERS`."""

    kind: str
    size: tuple[int, int] | None
    works: tuple[BatchShape, ...]
    more: tuple[BatchShape, ...] = ()


def _decodes(counts: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[BatchShape, ...]:
    return tuple(BatchShape(decodes=n, context=c) for c in contexts for n in counts)


def _chunks(*lengths: int) -> tuple[BatchShape, ...]:
    return tuple(BatchShape(chunk=n) for n in lengths)


MODELS = {
    "llava-1.5-7b": Shape(  # 0.5 MiB of KV per token
        "llava",
        (336, 336),
        (*_decodes((1, 32), (512, 2048)), *_chunks(512, 2048)),
        _decodes((128,), (512,)),
    ),
    "qwen2-vl-7b": Shape(  # 56 KiB
        "qwen2_vl", (672, 672), (*_decodes((1, 32, 128), (512, 2048)), *_chunks(512, 2048)), _chunks(8192)
    ),
    "gpt-oss-20b": Shape("gpt_oss", None, (*_decodes((1, 32), (512,)), *_chunks(2048))),
    "qwen3.5-9b": Shape("qwen3_5", (672, 672), (*_decodes((1, 32), (512,)), *_chunks(2048))),
}
PICTURES = (1, 4, 8, 16)
TINY = Shape("", (56, 56), (*_decodes((1, 3), (16, 40)), *_chunks(16, 48)), _chunks(96))


def folder_of(name: str, models: Path | None) -> Path:
    """The configuration of a model, or a tiny model of its family that is made below `models`."""
    return CONFIGS / name if models is None else tiny(MODELS[name].kind, models)


def random_model(
    folder: Path, device: torch.device, dtype: str, ops: OpSet | None = None, config: ModelConfig | None = None
) -> Model:
    """A model of both towers, of which nothing but config.json is read."""
    config = config or read_config(folder)
    ops = ops or select_ops(
        device, DTYPES[dtype], config.text.head_dim, attentions=attentions_of(config, Role.parse("EPD"), DTYPES[dtype])
    )
    with torch.inference_mode():
        model = Model(config, Role.parse("EPD"), ops, DTYPES[dtype], device)
        draw(model)
    return model


def draw(model: Model, seed: int = 0) -> None:
    """Matrices that keep the scale of what they multiply; norms that change nothing, biases of zero."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, slot in sorted(model.slots().items()):
        weight = slot.into
        assert isinstance(weight, torch.Tensor)
        if weight.dim() > 1:
            fan_in = 1 if "embed_tokens" in name else math.prod(weight.shape[1:])
            weight.normal_(0.0, fan_in**-0.5, generator=generator)
        else:
            weight.fill_(1.0 if name.endswith("weight") else 0.0)


INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 2 << 30


def make_checkpoint(out: Path, device: torch.device) -> None:
    """A checkpoint that any part of the project loads: a tiny one's tokenizer and preprocessing with the shapes of
    LLaVA-1.5-7B (14 GB; on a CPU those of the tiny one) and weights drawn on the device. The index is written last."""
    dry = device.type == "cpu"
    make_llava(out, image_size=56 if dry else VISION["image_size"])
    if not dry:
        config = json.loads((out / "config.json").read_text())
        config["text_config"] |= TEXT
        config["vision_config"] |= VISION
        (out / "config.json").write_text(json.dumps(config))
    slots = random_model(out, device, "bfloat16").slots()
    (out / "model.safetensors").unlink()
    written: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, slot in slots.items():
        assert isinstance(slot.into, torch.Tensor)
        shard[name] = slot.into.cpu().reshape(slot.expected).contiguous()
        if sum(weight.nbytes for weight in shard.values()) > _SHARD_BYTES:
            _save_shard(out, shard, written)
    _save_shard(out, shard, written)
    (out / INDEX).write_text(json.dumps({"weight_map": written}))


def _save_shard(out: Path, shard: dict[str, torch.Tensor], written: dict[str, str]) -> None:
    """Write the tensors to a file of their own, note its name, and forget them: so the host never holds all."""
    from safetensors.torch import save_file

    file = f"model-{len(set(written.values())) + 1:05}.safetensors"
    save_file(shard, out / file, metadata={"format": "pt"})
    written |= dict.fromkeys(shard, file)
    shard.clear()

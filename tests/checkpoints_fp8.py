"""Tiny checkpoints in FP8, scaled in the ways of published ones, and the same numbers in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCALES, NUMBERS = "model-1.safetensors", "model-2.safetensors"
_MATRIX = re.compile(r"(layers|blocks)\.\d+\.(?!conv).*(proj|w[123]|fc[12]|qkv)(\.weight)?$")


class Scaling(NamedTuple):
    """`block`: the rows and columns that share a scale; 0 for all. `ending`: that of the scales' names. `flat`: the
    scale has no dimensions but that of experts. `method`, `fields`: what config.json says."""

    block: tuple[int, int]
    ending: str = "_scale_inv"
    flat: bool = False
    dtype: str = "float32"
    method: str = "fp8"
    fields: Mapping[str, Any] = {}

    def config(self) -> dict[str, Any]:
        kept = {"modules_to_not_convert": ["lm_head"]}
        return {"quantization_config": {"quant_method": self.method} | kept | dict(self.fields)}


_STATIC = {"activation_scheme": "static"}
SCALINGS = {
    "blocks": Scaling((16, 16), dtype="bfloat16", fields={"weight_block_size": [16, 16]}),
    "uneven blocks": Scaling((24, 40), fields={"weight_block_size": [24, 40]}),
    "usual blocks": Scaling((128, 128), dtype="bfloat16", fields={"weight_block_size": [128, 128]}),
    "usual blocks, unsaid": Scaling((128, 128)),
    "tensor": Scaling((0, 0), flat=True, dtype="bfloat16", fields=_STATIC | {"weight_block_size": None}),
    "tensor, unsaid": Scaling((0, 0), "_scale", flat=True, fields=_STATIC),
    "row": Scaling((1, 0), "_scale", method="fbgemm_fp8", fields={"activation_scale_ub": 1200.0}),
}


def make_fp8(folder: Path, make: Callable[[Path], Path], how: str, also: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A checkpoint of `make` whose layers' matrices, and the tensors `also`, are FP8 numbers, in another file than
    their scales; and one with the same numbers, scale times number, in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    scaling = SCALINGS[how]
    published, plain = (make(folder / name) for name in ("published", "plain"))
    wide = load_file(plain / "model.safetensors")
    narrow, rest = {}, {}
    for name, tensor in wide.items():
        if not (_MATRIX.search(name) or name in also) or tensor.ndim < 2:
            rest[name] = tensor
            continue
        narrow[name], scales, wide[name] = _quantised(tensor, scaling)
        rest[name + scaling.ending] = scales[..., 0, 0].clone() if scaling.flat else scales
        if "activation_scheme" in scaling.fields:
            rest[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
    assert narrow, "nothing is in FP8"
    save_file(wide, plain / "model.safetensors")
    save_fp8(published, {SCALES: rest, NUMBERS: narrow}, scaling.config())
    return published, plain


def _quantised(tensor, scaling: Scaling):
    """A tensor [..., rows, columns] as FP8 numbers, their scales [..., rows of blocks, columns of blocks], and the
    float32 numbers that these are."""
    import torch
    import torch.nn.functional as F

    *_, rows, columns = tensor.shape
    tall, broad = scaling.block[0] or rows, scaling.block[1] or columns
    padded = F.pad(tensor, (0, -columns % broad, 0, -rows % tall))
    largest = padded.unflatten(-1, (-1, broad)).unflatten(-3, (-1, tall)).abs().amax((-3, -1))
    scales = (largest / 448).to(getattr(torch, scaling.dtype))
    factors = scales.float().repeat_interleave(tall, -2).repeat_interleave(broad, -1)[..., :rows, :columns]
    numbers = (tensor / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, scales, factors * numbers.float()


def save_fp8(path: Path, files: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Any]) -> None:
    """Replace a checkpoint's weights by those of `files`, and fields of its config.json."""
    from safetensors.torch import save_file

    for old in path.glob("*.safetensors*"):
        old.unlink()
    for file, tensors in files.items():
        save_file(dict(tensors), path / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    content = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(content))

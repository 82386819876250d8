"""Whatever a field of config.json says: logits and embeddings of pictures are those of transformers, or the checkpoint
is refused. Changed are the fields that transformers' own models look at, each by itself."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.configuration_utils import PreTrainedConfig

from hydrainfer.core import CheckpointError, Role
from hydrainfer.families import read_config
from hydrainfer.models import Model, PatchedPicture, load_model
from tests.checkpoints import make_llava, randomise
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_qwen import FAMILIES, make_qwen
from tests.checkpoints_text import KINDS, make_text, settle_gemma, settle_mixers
from tests.families.internvl import make_internvl
from tests.models.teacher import teacher_forced

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]

IDS = torch.randint(3, 1500, (45,), generator=torch.Generator().manual_seed(0)).tolist()
GRIDS = ((1, 2, 2), (1, 5, 3), (2, 4, 6))
LEFT_OUT = "left out"
_ACTIVATIONS = ("gelu", "relu", "silu", "quick_gelu")
_OTHER = ("architectures", "model_type", "dtype", "id2label", "label2id", "auto_map", "_token_id", "_token_index")
_OLD = {"original_max_position_embeddings": 16, "rope_theta": 500.0, "factor": 3.0}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "yarn", **_OLD, "mscale": 0.7, "mscale_all_dim": 1.1},
    {"rope_type": "yarn", **_OLD, "attention_factor": 1.7, "truncate": False, "beta_fast": 3.0, "beta_slow": 2.0},
    {"rope_type": "llama3", **_OLD, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "proportional", "rope_theta": 500.0, "factor": 2.0},
)


def make(family: str, out: Path) -> Path:
    if family in KINDS:
        return make_text(out, family)
    if family in FAMILIES:
        return make_qwen(family, out, published=False)
    return {"llava": make_llava, "gemma3, pictures": make_gemma, "internvl": make_internvl}[family](out)


class Reads:
    """The names of fields that files of transformers with models in them read meanwhile."""

    def __init__(self, monkeypatch) -> None:
        self.names: set[str] = set()
        usual = PreTrainedConfig.__getattribute__

        def read(config: PreTrainedConfig, name: str) -> object:
            file = Path(sys._getframe(1).f_code.co_filename)
            models = file.parent.parent.name == "models" and not file.name.startswith("configuration_")
            if models or file.name in ("modeling_rope_utils.py", "masking_utils.py", "vision_utils.py"):
                self.names.add(name)
            return usual(config, name)

        monkeypatch.setattr(PreTrainedConfig, "__getattribute__", read)


def values(name: str, found: Any) -> Iterator[Any]:
    """What may stand in a field instead."""
    yield LEFT_OUT
    if isinstance(found, bool):
        yield not found
    elif isinstance(found, int):
        yield from (2 * found, found // 2, found + 1, 0, None, 64, 5000)
    elif isinstance(found, float):
        yield from (0.3, 1e-3) if found < 0.01 else (found * 2, found / 2)
    elif isinstance(found, str):
        yield from (a for a in _ACTIVATIONS if "act" in name and a != found)
    elif found is None:
        yield from (1, 4, 20, 0.5, True, False, [0])
    elif isinstance(found, list) and found:
        yield from (found[::-1], found[:-1], [found[0]] * len(found), [found[-1]] * len(found), None)


def changes(config: dict[str, Any], names: set[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Ways to a field, and what shall stand there."""
    for at in ((), ("text_config",), ("vision_config",)):
        section = part(config, at)
        for name in sorted(names | {"rope_theta"} if isinstance(section, dict) else ()):
            found = section.get(name)
            if name == "rope_parameters" and found:
                inner = [n for n, value in found.items() if isinstance(value, dict)]
                keep = {n: value for n, value in found.items() if n.startswith("mrope")}
                for place in ((), *((n,) for n in inner)):
                    yield from (((*at, name, *place), rope | keep) for rope in ROPES)
                    yield from (((*at, name, *place), rope | keep | {"partial_rotary_factor": 0.5}) for rope in ROPES)
                yield from (((*at, name, n), value) for n in inner for value in (None, LEFT_OUT))
            elif not (hasattr(PreTrainedConfig, name) or isinstance(found, dict) or name.endswith(_OTHER)):
                yield from (((*at, name), value) for value in values(name, found))


def part(config: Any, at: tuple[str, ...]) -> Any:
    for name in at:
        config = config.get(name)
    return config


def changed(config: dict[str, Any], at: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    section = part(config, at[:-1])
    if value == LEFT_OUT:
        section.pop(at[-1], None)
    else:
        section[at[-1]] = value
    return config


def reference(kind: Any, path: Path) -> Any:
    """transformers' model of this configuration, with weights drawn for it."""
    model = kind(transformers.AutoConfig.from_pretrained(path)).float().eval()
    randomise(model, 5)
    settle_mixers(model)
    settle_gemma(model)
    return model


def pictures(model: Model) -> list[PatchedPicture]:
    c, rng = model.config.vision, np.random.default_rng(0)
    if c.image_size:
        return [PatchedPicture(rng.integers(0, 256, (c.image_size, c.image_size, 3), dtype=np.uint8))]
    side = c.patch * c.merge
    return [
        PatchedPicture(rng.integers(0, 256, (t * c.temporal, h * side, w * side, 3), dtype=np.uint8), (t, h, w))
        for t, h, w in GRIDS
    ]


def features(whole: Any, model: Model) -> torch.Tensor:
    """What transformers makes of `pictures`."""
    c = model.config.vision
    mean, std = torch.tensor(c.pixels.mean), torch.tensor(c.pixels.std)
    some = [(torch.from_numpy(p.pixels).float() * c.pixels.scale - mean) / std for p in pictures(model)]
    if c.image_size:
        made = whole.get_image_features(pixel_values=some[0].permute(2, 0, 1)[None]).pooler_output
        return made[0] if isinstance(made, list | tuple) else made.flatten(0, -2)
    grids = torch.tensor([[t, c.merge * h, c.merge * w] for t, h, w in GRIDS])
    parts = [x.view(t, c.temporal, h, c.merge, c.patch, w, c.merge, c.patch, 3) for x, (t, h, w) in zip(some, GRIDS)]
    patches = torch.cat([x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).flatten(0, 4).flatten(1) for x in parts])
    if not hasattr(whole.model, "visual"):
        return torch.cat(whole.model.get_image_features(patches, grids).pooler_output)
    made = whole.model.visual(patches, grid_thw=grids)
    return torch.cat([made.pooler_output, *getattr(made, "deepstack_features", ())], dim=1)


def problem(kind: Any, path: Path, config: dict[str, Any]) -> str | None:
    """What is wrong with how a configuration is served, in words."""
    for file in path.glob("model*.safetensors"):
        file.unlink()
    (path / "config.json").write_text(json.dumps(config))
    try:
        read_config(path)
    except CheckpointError as e:
        return "refused in several lines" if "\n" in e.message else None
    try:
        whole = reference(kind, path)
        with torch.inference_mode():
            want = whole(torch.tensor([IDS]), use_cache=False).logits[0]
    except Exception:  # it makes no sense to transformers
        return None
    whole.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    try:
        model = load_model(path, Role.parse("EPD"))
    except CheckpointError as e:
        return f"refused for its weights: {e.message}"
    worst = {"logits": float((teacher_forced(model, IDS) - want).abs().max())}
    if model.vision is not None:
        try:
            with torch.inference_mode():
                rows = features(whole, model)
        except (IndexError, RuntimeError, TypeError):  # neither does this
            return None
        got = torch.cat([r.flatten(0, -2) for r in model.encode(pictures(model))])
        worst["rows"] = float((got - rows).abs().max() / rows.std()) if got.shape == rows.shape else float("inf")
    return next((f"{name} differ by {n:.1e}" for name, n in worst.items() if not n < 2e-3), None)


@pytest.mark.parametrize("n", [8, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("family", [*KINDS, *FAMILIES, "llava", "gemma3, pictures", "internvl"])
def test_no_field_is_passed_over(family, n, tmp_path, monkeypatch):
    path = make(family, tmp_path)
    kind = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    config = json.loads(json.dumps(transformers.AutoConfig.from_pretrained(path).to_dict()))
    config["architectures"] = [kind.__name__]
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        assert problem(kind, path, config) is None
    assert {"hidden_size", "max_position_embeddings"} <= reads.names
    every = list(changes(config, reads.names))
    for at, value in random.Random(len(every)).sample(every, min(n, len(every))):
        found = problem(kind, path, changed(config, at, value))
        assert found is None, f"{'.'.join(at)} = {value!r}: {found}"

"""The measurements of matrix products while a model loads, so that no request waits for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import PatchedPicture, load_model
from hydrainfer.models.decoder import LastRows
from hydrainfer.ops import select_ops
from hydrainfer.ops.reference import experts
from tests.checkpoints import make_llava
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.models.teacher import teacher_forced

pytestmark = pytest.mark.cpu
_TEXT = ("qwen3", "qwen3_moe", "qwen3_next", "lfm2", "gpt_oss", "mimo")
_VISION = ("qwen2_5_vl", "qwen3_vl_moe", "lfm3_vl")


@pytest.fixture(scope="module", params=["llava", "gemma3_vl", *_VISION, *_TEXT])
def published(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param in _VISION:
        return make_qwen(request.param, path)
    makes = {"llava": make_llava, "gemma3_vl": make_gemma}
    return makes[request.param](path) if request.param in makes else make_text(path, request.param)


def picture(vision):
    """A black one that the tower takes as it is."""
    if vision.image_size:
        return PatchedPicture(np.zeros((vision.image_size, vision.image_size, 3), np.uint8))
    side = 2 * vision.patch * vision.merge
    return PatchedPicture(np.zeros((1, side, side, 3), np.uint8), (1, 2, 2))


@pytest.mark.parametrize("quantized", [False, True], ids=["wide", "int8"])
@pytest.mark.parametrize("role", ["EPD", "E", "PD", "D"])
def test_products_by_every_shape_of_weight_are_measured_while_it_loads(published, role, quantized):
    """The shapes are those that are multiplied by, and no others. Queries, keys and values are one weight, each expert
    is its own; the last layer multiplies most rows only by keys and values."""
    config = read_config(published)
    if role == "E" and config.vision is None:
        pytest.skip("it takes no pictures")
    head_dim = config.text.head_dim
    ops = select_ops("cpu", torch.float32, head_dim, quantization="int8" if quantized else "none")
    asked, met = set(), set()

    class Products:
        def prepare(self, weight):
            asked.add((type(weight), tuple(weight.shape)))

        def packs(self, weight):
            return False

        def compiles(self, x, weight):
            return False

    def linear(x, weight, bias=None):
        if model.language is None or weight is not model.language.head:  # which multiplies few rows
            met.add((type(weight), tuple(weight.shape)))
        return ops.linear(x, weight, bias)

    def linear_add(out, x, weight, bias=None):
        return out.add_(linear(x, weight, bias))

    watched = replace(ops, products=Products(), linear=linear, linear_add=linear_add, decoder=None, experts=experts)
    model = load_model(published, Role.parse(role), ops=watched)
    if model.vision:
        model.encode([picture(config.vision)])
    if model.language and role != "D":
        for last in (None, LastRows(torch.empty(0, dtype=torch.int64), [None])):
            teacher_forced(model, list(range(5, 25)), last=last)
    assert met == asked
    assert bool(asked) == (role != "D")

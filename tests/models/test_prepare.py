"""The measurements of matrix products while a model loads, so that no request waits for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hydrainfer.checkpoint import read_config
from hydrainfer.core import Role
from hydrainfer.models import PatchedPicture, load_model
from hydrainfer.ops import select_ops
from hydrainfer.ops.reference import experts
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.models.teacher import teacher_forced

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", params=["llava", "qwen3_moe", "gpt_oss"])
def published(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return make_llava(path) if request.param == "llava" else make_text(path, request.param)


@pytest.mark.parametrize("quantized", [False, True], ids=["wide", "int8"])
@pytest.mark.parametrize("role", ["EPD", "E", "PD", "D"])
def test_products_by_every_shape_of_weight_are_measured_while_it_loads(published, role, quantized):
    """The shapes are those that are multiplied by: queries, keys and values are one weight, each expert is its own."""
    if role == "E" and read_config(published).vision is None:
        pytest.skip("it takes no pictures")
    ops = select_ops("cpu", torch.float32, 16, quantization="int8" if quantized else "none")
    asked, met = set(), set()

    class Products:
        def prepare(self, weight):
            asked.add((type(weight), tuple(weight.shape)))

        def packs(self, weight):
            return False

        def compiles(self, x, weight):
            return False

    def linear(x, weight, bias=None):
        met.add((type(weight), tuple(weight.shape)))
        return ops.linear(x, weight, bias)

    def linear_add(out, x, weight, bias=None):
        return out.add_(linear(x, weight, bias))

    watched = replace(ops, products=Products(), linear=linear, linear_add=linear_add, decoder=None, experts=experts)
    model = load_model(published, Role.parse(role), ops=watched)
    if model.vision:
        side = model.config.vision.image_size
        model.encode([PatchedPicture(np.zeros((side, side, 3), np.uint8))])
    if model.language and role != "D":
        teacher_forced(model, list(range(5, 25)))
    assert {pair for pair in met if pair[1][0] != model.config.text.vocab} <= asked
    assert bool(asked) == (role != "D")

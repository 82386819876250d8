"""What travels to a GPU's machine without network: the compiled modules are those that its tests and models ask for."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from benchmarks.gpu import carry
from benchmarks.gpu.modules import MODULES
from benchmarks.gpu.shapes import CONFIGS, MODELS
from benchmarks.gpu.tiny import MAKERS, tiny
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import attentions_of

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    return [*(CONFIGS / name for name in MODELS), *(tiny(kind, models) for kind in MAKERS)]


def test_every_model_of_the_session_finds_its_modules(folders):
    for folder in folders:
        attentions = attentions_of(read_config(folder), Role.parse("EPD"), torch.bfloat16)
        wanted = list(chain.from_iterable(attention.modules() for attention in attentions if not attention.refusal()))
        assert wanted and not set(wanted) - set(MODULES), folder.name


def test_versions_are_those_of_the_project():
    assert carry.pinned(carry.FLASHINFER).startswith("flashinfer-python==")
    assert (
        carry.pinned("pydantic_core").startswith("pydantic_core==") and carry.pinned("no-such-thing") == "no-such-thing"
    )


def test_flashinfer_is_cut_to_what_was_loaded(tmp_path):
    source, built = tmp_path / "source", tmp_path / "built" / "module_a.so"
    for name in (
        "core.py",
        "fused_moe/big.py",
        "jit/attention/late.py",
        "data/csrc/batch_prefill.jinja",
        "data/csrc/x.cu",
    ):
        path = source / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (source / "flashinfer_python-1.dist-info").mkdir()
    (source / "flashinfer_python-1.dist-info" / "METADATA").write_text("Name: flashinfer-python\n")
    built.parent.mkdir()
    built.write_bytes(b"code")
    carry.cut(source, {"files": ["core.py"], "libraries": [str(built)]}, tmp_path / "site")
    kept = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert kept == {
        "flashinfer/core.py",
        "flashinfer/jit/attention/late.py",
        "flashinfer/data/csrc/batch_prefill.jinja",
        "flashinfer/data/aot/module_a/module_a.so",
        "flashinfer_python-1.dist-info/METADATA",
    }

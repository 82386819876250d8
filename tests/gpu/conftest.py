"""Where the GPU's tests run: on CUDA, or, to see that they would, on a CPU (`pytest tests/gpu -m gpu --device cpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda")
    parser.addoption("--models", type=Path, help="where tiny checkpoints are, or are made")
    parser.addoption("--few", action="store_true", help="of each test only some cases: a dry run")


@pytest.fixture(scope="session")
def device(request):
    torch = pytest.importorskip("torch")
    name = request.config.getoption("device", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(name, 0) if name == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def models(request, tmp_path_factory):
    return request.config.getoption("models", None) or tmp_path_factory.mktemp("models")


def pytest_collection_modifyitems(config, items):
    """With `--few`: the first and the last case of each test."""
    if not config.getoption("few", False):
        return
    by_test = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [item for cases in by_test.values() for item in {id(i): i for i in (cases[0], cases[-1])}.values()]

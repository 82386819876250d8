import pytest

from hydrainfer.processor import load_description
from tests.checkpoints import make_llava


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=512)


@pytest.fixture(scope="session")
def model(checkpoint):
    return load_description(checkpoint)

import threading

import pytest

from hydrainfer.processor import Fetcher, load_description
from tests.checkpoints import make_llava


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=512)


@pytest.fixture(scope="session")
def model(checkpoint):
    return load_description(checkpoint)


@pytest.fixture
def fetchers_closed(monkeypatch):
    """Every fetcher is closed in the end, and leaves no download and no thread."""
    made, init = [], Fetcher.__init__

    def note(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Fetcher, "__init__", note)
    yield
    n_left = sum(fetcher._thread.n_tasks for fetcher in made)
    for fetcher in made:
        fetcher.close()
    assert not n_left and not [t for t in threading.enumerate() if t.name.startswith("hydra-fetch")]

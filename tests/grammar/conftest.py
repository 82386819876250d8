import pytest

from hydrainfer.grammar import load_grammars
from tests.checkpoints import make_tokenizer

N_VOCAB = 2031  # no multiple of 32, and more than the tokenizer has
EOS = 2


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer().backend_tokenizer


@pytest.fixture(scope="session")
def make_grammars(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return lambda **options: load_grammars(path, N_VOCAB, (EOS,), **options)


@pytest.fixture
def grammars(make_grammars):
    made = make_grammars()
    yield made
    made.close()

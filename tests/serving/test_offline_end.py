"""An LLM that nobody closes ends with Python, in silence."""

import subprocess
import sys

import pytest

from tests.checkpoints import make_llava

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
SCRIPT = """
import sys
from hydrainfer import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], layout=sys.argv[2], log_level="warning", threads=1)
    print(len(llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)))
    print(*{"torch._dynamo", "sympy"} & sys.modules.keys())
    print("Python ends", file=sys.stderr)
"""


@pytest.fixture(scope="module", params=["1EPD", "1EP1D"])
def ended(request, tmp_path_factory):
    """The script, which has ended."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    model = str(make_llava(folder / "llava"))
    words = [sys.executable, str(folder / "script.py"), model, request.param]
    return subprocess.run(words, capture_output=True, text=True)


def test_an_unclosed_one_ends_well(ended):
    """With several instances, the thread that keeps Ray alive would end before they are told to."""
    assert ended.returncode == 0 and ended.stdout.startswith("1\n"), ended.stderr
    assert ended.stderr.rpartition("Python ends")[2].strip() == ""


def test_torchs_compiler_is_not_imported(ended):
    """Nothing is compiled by it, and it would take a second of each start."""
    assert ended.stdout.splitlines()[1:] == [""], ended.stdout

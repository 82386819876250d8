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
    print("Python ends", file=sys.stderr)
"""


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D"])
def test_an_unclosed_one_ends_well(tmp_path, layout):
    """With several instances, the thread that keeps Ray alive would end before they are told to."""
    (tmp_path / "script.py").write_text(SCRIPT)
    model = str(make_llava(tmp_path / "llava"))
    words = [sys.executable, str(tmp_path / "script.py"), model, layout]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1\n"), done.stderr
    assert done.stderr.rpartition("Python ends")[2].strip() == ""

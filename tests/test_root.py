"""The top-level folders `kernels/` and `datasets/` bear the names of packages on PyPI that transformers looks for.

Without an `__init__.py` they are at most namespace packages, which any installed package of the name goes before.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parent.parent
ASK = """
import sys, importlib.util
sys.path.append(sys.argv[1])
print(*(importlib.util.find_spec(name).origin for name in ("kernels", "datasets")))
"""
LOAD = "from transformers import AutoConfig, AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor"


def run_at_root(*args):
    return subprocess.run([sys.executable, "-c", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_an_installed_package_is_not_shadowed(tmp_path):
    for name in ("kernels", "datasets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert run_at_root(ASK, str(tmp_path)).split() == [
        str(tmp_path / name / "__init__.py") for name in ("kernels", "datasets")
    ]


def test_transformers_loads_from_the_root():
    run_at_root(LOAD)

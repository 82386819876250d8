"""The top-level folders `kernels/` and `datasets/` bear the names of packages that transformers looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parent.parent
ASK = "from transformers.utils import is_datasets_available as d, is_kernels_available as k; print(d(), k())"


def test_running_from_the_root_shadows_no_package(tmp_path):
    said = {
        subprocess.run([sys.executable, "-c", ASK], cwd=folder, capture_output=True, text=True, check=True).stdout
        for folder in (ROOT, tmp_path)
    }
    assert len(said) == 1

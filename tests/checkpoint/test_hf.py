"""Reading config.json with transformers imports no module that a server never needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from tests.checkpoints import make_llava

pytestmark = pytest.mark.cpu

_READ = """
import sys
from hydrainfer.families import read_config
seen = []
sys.addaudithook(lambda event, args: seen.append("transformers.activations" in sys.modules))
read_config(sys.argv[1])
assert seen and not any(seen), "other threads would have seen it"
assert "transformers.utils.type_validators" in sys.modules, "it has moved: is hf.py still needed?"
for name in ("transformers.activations", "sympy", "torch._dynamo"):
    assert name not in sys.modules, name
import transformers.activations
assert "gelu" in transformers.activations.ACT2FN
transformers.AutoModelForImageTextToText.from_pretrained(sys.argv[1])
"""


def test_a_configuration_imports_no_compiler_and_models_load_as_ever(tmp_path):
    make_llava(tmp_path)
    done = subprocess.run([sys.executable, "-c", _READ, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


_READ_OTHERWISE = """
import sys
from hydrainfer.checkpoint import hf
from hydrainfer.families import read_config
def fails(name):
    raise ValueError
setattr(hf, *{"import": ("_IMPORT", "nowhere"), "anything": ("find_spec", fails)}[sys.argv[2]])
read_config(sys.argv[1])
assert "gelu" in sys.modules["transformers.activations"].ACT2FN
"""


@pytest.mark.parametrize("changed", ["import", "anything"])
def test_where_transformers_has_changed_it_imports_its_validators_itself(tmp_path, changed):
    make_llava(tmp_path)
    command = [sys.executable, "-c", _READ_OTHERWISE, str(tmp_path), changed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_an_activation_that_nobody_knows_is_refused(tmp_path, section):
    file = make_llava(tmp_path) / "config.json"
    config = json.loads(file.read_text())
    config[section]["hidden_act"] = "wobble"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="wobble"):
        read_config(tmp_path)

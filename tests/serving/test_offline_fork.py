"""After a fork an LLM says what is wrong, instead of waiting for ever for threads that are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hydrainfer
from tests.checkpoints import make_llava

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
SCRIPT = """
import multiprocessing, sys, time
from hydrainfer import LLM
from hydrainfer.core import ConfigError

def tried(name, call):
    begin_s = time.monotonic()
    try:
        call()
    except ConfigError as e:
        print(name, "use spawn" in e.message, time.monotonic() - begin_s < 1.0, flush=True)

def child(llm):
    tried("another", lambda: LLM(sys.argv[1], threads=2, log_level="warning"))
    if llm is not None:
        tried("the same", lambda: llm.generate(["hi"], use_tqdm=False))
        llm.close()

if __name__ == "__main__":
    llm = LLM(sys.argv[1], threads=2, log_level="warning")
    llm.generate(["hi"], use_tqdm=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(llm,))
    process.start()
    process.join(60)
    print("ended", process.exitcode, flush=True)
    process.kill()
    print("goes on", len(llm.generate(["hi"], use_tqdm=False)))
    llm.close()
"""


def test_a_forked_child_is_told_to_be_spawned(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    model = str(make_llava(tmp_path / "llava"))
    here = {**os.environ, "PYTHONPATH": str(Path(hydrainfer.__file__).parents[1])}
    words = [sys.executable, str(tmp_path / "script.py"), model]
    done = subprocess.run(words, capture_output=True, text=True, env=here)
    said = ["another True True", "the same True True", "ended 0", "goes on 1"]
    assert done.stdout.splitlines() == said, done.stdout + done.stderr

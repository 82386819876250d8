"""For checks of command-line tools: runs one that is installed beside this interpreter."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import SEES

ROOT_URL = SEES.removesuffix("/v1")
MODEL = os.environ["CLIENTS_MODEL"]
"""Folder of the built-in model, whose tokenizer the tools read."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


def run_tool(*words: str, home: str, timeout_s: float = 240) -> str:
    """What it prints; it finds an empty `home`. Raises `RuntimeError` with its last line if it fails."""
    program = str(Path(sys.executable).parent / words[0])
    environment = {**os.environ, **OFFLINE, "HOME": home, "HF_HOME": home}
    done = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=home, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise RuntimeError(
            f"{words[0]} ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return done.stdout + done.stderr


def results(folder: str, pattern: str) -> Any:
    """The JSON of the one file that a tool has left."""
    (found,) = Path(folder).rglob(pattern)
    return json.loads(found.read_text())


def home() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tool-")

"""Greedy tokens of transformers with its torchvision image processors, found in a process of their own.

    python -m tests.equivalence.torchvision_reference FOLDER CHECKPOINTS.json RESULTS.json

FOLDER: where `make torchvision` has put the package. CHECKPOINTS: a path by family. RESULTS: by family and chat, the
ids of the prompt, those of the answer, and the distance of the two best logits for each of the latter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.processor.pictures.torchvision_reference import add_torchvision

N_NEW = 12


def reference(family: str, path: Path) -> Any:
    import transformers

    from tests.equivalence import qwen_reference
    from tests.equivalence.reference import Reference

    if family == "llava":
        found = Reference(path, backend="torchvision")
        pictures = found.processor.image_processor
    else:
        found = qwen_reference.Reference(path, transformers.Qwen2VLImageProcessor)
        pictures = found.pictures
    assert pictures.backend == "torchvision"
    return found


def main(folder: str, checkpoints: str, results: str) -> None:
    library = add_torchvision(folder)  # noqa: F841
    from tests.families.chats import PICTURES

    found = {}
    for family, path in json.loads(Path(checkpoints).read_text()).items():
        one = reference(family, Path(path))
        found[family] = {name: one.greedy(chat, N_NEW) for name, chat in PICTURES.items()}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

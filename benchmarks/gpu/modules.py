"""Compiles the FlashInfer modules that the session's tests and models ask for. The last line of stdout is JSON: the
libraries, and the files of FlashInfer that were imported. `benchmarks.gpu.carry` calls it with FlashInfer's variables.

`--load` loads the modules instead, as an installation that may not compile does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hydrainfer.ops.cuda.flashinfer_modules import Module, modules_for

BF16 = torch.bfloat16
MODULES = (
    *(Module("plain", BF16, dim, dim, windowed) for dim in (128, 64, 256) for windowed in (False, True)),
    *(Module("sinks", BF16, 64, 64, windowed) for windowed in (False, True)),  # gpt-oss
    Module("ranges", BF16, 256, 256, False),  # Gemma 3
    Module("cuda-cores", BF16, 128, 128, False),  # LLaVA, for comparison
)


def main() -> None:
    import flashinfer

    if sys.argv[1:] == ["--load"]:
        for spec in modules_for(MODULES):
            spec.build_and_load()
        print(f"{len(MODULES)} modules loaded")
        return
    libraries = []
    for spec in modules_for(MODULES):
        if spec.get_library_path() != spec.aot_path:
            spec.build()
        print(spec.name, file=sys.stderr, flush=True)
        libraries.append(str(spec.get_library_path()))
    root = Path(flashinfer.__file__).parent
    files = {Path(str(file)) for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))}
    print(
        json.dumps(
            {"libraries": libraries, "files": sorted(str(f.relative_to(root)) for f in files if root in f.parents)}
        )
    )


if __name__ == "__main__":
    main()

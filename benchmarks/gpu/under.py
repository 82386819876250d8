"""Runs a module under a tool such as compute-sanitizer or ncu; where there is no such tool, as it is.

python -m benchmarks.gpu.under TOOL [OPTION ...] -- MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import os
import shutil
import sys


def main() -> None:
    at = sys.argv.index("--")
    tool, *options = sys.argv[1:at]
    found = shutil.which(tool) or shutil.which(tool, path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    if found is None:
        print(f"{tool} is not here: the part runs without it", flush=True)
    before = [] if found is None else [found, *options]
    command = [*before, sys.executable, "-m", *sys.argv[at + 1 :]]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

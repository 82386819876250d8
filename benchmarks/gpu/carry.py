"""What a bare GPU machine without network lacks, in one folder that travels with the working tree.

    python -m benchmarks.gpu.carry .gpu            (here, without a GPU; then copy the tree and .gpu to that machine)
    bash benchmarks/gpu_session.sh look            (there; it unpacks .gpu and puts it on PYTHONPATH)

The machine has torch, transformers and nvcc. The archive has the other packages that an instance and its server need,
and FlashInfer cut down to what attention needs, with its modules compiled for the GPU, so that nothing has to be
compiled there. Ray, PyAV and gguf are left out. Builds are kept in the cache folder: a second run only copies. Ends
with an error if the folder is larger than `--limit-mib`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from benchmarks.record import ROOT, revision
from hydrainfer.config import cache_folder

PACKAGES = (
    *("msgspec", "pyzmq", "orjson", "fastapi", "starlette", "pydantic", "pydantic_core", "typing-inspection"),
    *("annotated-types", "annotated-doc", "opentelemetry-api", "typing-extensions", "limits", "Deprecated", "uvicorn"),
    *("httptools", "apache-tvm-ffi", "llguidance"),
)
FLASHINFER = "flashinfer-python"
_NEEDS = ("einops", "tabulate", "nvidia-ml-py", "requests", "urllib3", "idna", "certifi", "charset-normalizer", "tqdm")
"""Imported by FlashInfer; the machine has them, this one may not."""
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014", "manylinux1")
_TEMPLATES = ("batch_prefill*", "batch_decode*")  # of FlashInfer's sources: those that modules' names are made with
_WHOLE = ("jit", "attention")  # packages of FlashInfer that import parts of themselves late
MIB = 1 << 20


def pinned(name: str) -> str:
    """`name==version`, as constraints.txt or the `cuda` extra has it; the bare name where nothing pins it."""
    wanted = name.lower().replace("_", "-")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines += [part.strip('" ,]') for part in (ROOT / "pyproject.toml").read_text().split("[") for part in part.split()]
    for line in lines:
        found, _, version = line.partition("==")
        if version and found.lower().replace("_", "-") == wanted:
            return f"{name}=={version}"
    return name


def download(names: tuple[str, ...], into: Path, python: str | None) -> list[Path]:
    """Wheels of packages without what they depend on: for this interpreter, or for CPython `python` on Linux."""
    into.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(into)]
    if python is not None:
        platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
        command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    subprocess.run([*command, *map(pinned, names)], check=True)
    return sorted(into.glob("*.whl"))


def unpack(wheels: list[Path], into: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)


def build_modules(source: Path, needs: Path, cache: Path, arch: str) -> dict[str, list[str]]:
    """Compile FlashInfer's modules and say where their libraries are, and which of its files they were made with
    (`benchmarks.gpu.modules`, in a process that imports the unpacked FlashInfer of `source`)."""
    stubs = cache / "stubs"
    stubs.mkdir(exist_ok=True)
    subprocess.run(
        ["ar", "rc", stubs / "libcuda.a"], check=True
    )  # modules name the driver's library and use none of it
    environment = (
        {"CUDA_HOME": "/usr/local/cuda"}
        | os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, (source, needs, ROOT))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),  # for ninja
            "FLASHINFER_CUDA_ARCH_LIST": arch,
            "FLASHINFER_WORKSPACE_BASE": str(cache),
            "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
        }
    )
    command = [sys.executable, "-m", "benchmarks.gpu.modules"]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cut(source: Path, built: dict[str, list[str]], into: Path) -> None:
    """FlashInfer's loaded files, the packages that import late, its templates and the compiled modules."""
    package = source / "flashinfer"
    files = {package / name for name in built["files"]}
    files |= {path for name in _WHOLE for path in (package / name).rglob("*.py")}
    files |= {path for name in _TEMPLATES for path in (package / "data" / "csrc").glob(name)}
    for path in sorted(files):
        target = into / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for info in source.glob("*.dist-info"):
        (into / info.name).mkdir(exist_ok=True)
        shutil.copyfile(info / "METADATA", into / info.name / "METADATA")
    for library in map(Path, built["libraries"]):
        target = into / "flashinfer" / "data" / "aot" / library.stem / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("--arch", default="9.0", help="the GPU's compute capability")
    parser.add_argument("--python", default="3.12", help="the machine's CPython")
    parser.add_argument("--limit-mib", type=float, default=40.0)
    args = parser.parse_args(argv)
    cache = cache_folder() / "carry"
    wheels = cache / f"wheels-{args.python}"
    shutil.rmtree(wheels, ignore_errors=True)
    packages = download(PACKAGES, wheels, args.python)
    source, needs = cache / "flashinfer", cache / "needs"
    if not (source / "flashinfer").is_dir():
        unpack(download((FLASHINFER,), cache / "flashinfer-wheel", None), source)
        unpack(download(_NEEDS, cache / "needs-wheels", None), needs)
    built = build_modules(source, needs, cache, args.arch)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        site = Path(made)
        unpack(packages, site)
        others = size_of(site)
        cut(source, built, site)
        print(f"{others / MIB:.1f} MiB of packages, {(size_of(site) - others) / MIB:.1f} MiB of FlashInfer with")
        with tarfile.open(args.folder / "site.tar.gz", "w:gz", compresslevel=6) as archive:
            archive.add(site, "site")
    (args.folder / "revision").write_text(revision() + "\n")
    total = size_of(args.folder)
    print(*(f"  {Path(library).stem}" for library in built["libraries"]), sep="\n")
    print(f"{total / MIB:.1f} MiB in {args.folder}, at most {args.limit_mib:g} wanted")
    return 0 if total <= args.limit_mib * MIB else 1


if __name__ == "__main__":
    sys.exit(main())

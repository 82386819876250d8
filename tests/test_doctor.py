"""The doctor finds what is wrong with a machine, and says so in words."""

import json
import re
import resource
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hydrainfer import doctor, machine
from hydrainfer.assemble import media
from hydrainfer.cli import app
from hydrainfer.cluster.folder import OBJECT_STORE_BYTES
from hydrainfer.ops import select
from hydrainfer.stores import Contents, Trial, parse_places
from hydrainfer.stores.files import summary
from hydrainfer.version import __version__
from tests.stores.resp_server import free_port

pytestmark = pytest.mark.cpu


def findings(*words):
    result = CliRunner().invoke(app, ["doctor", "--no-serve", "--json", *words])
    return result.exit_code, {f["name"]: f for f in map(json.loads, result.output.splitlines())}


def stores(text):
    """The states of a store's places, and what is said about them."""
    return [(finding.state, finding.says) for finding in doctor._store(text)]


def test_the_doctor_finds_packages_kernels_and_cores():
    code, found = findings("--port", "0")
    assert code == 0 and {f["state"] for f in found.values()} <= {"ok", "note"}
    assert found["hydrainfer"]["says"] == __version__ and "torch" in found["packages"]["says"]
    assert "attention" in found["CPU kernels"]["says"] and "cores" in found["machine"]["says"]


def test_what_resizes_pictures(monkeypatch):
    assert doctor._resizing() == ("resizing", "ok", "our kernel resizes pictures, to torchvision's pixels")
    monkeypatch.setattr(media, "build_resampler", lambda source: "")
    found = doctor._resizing()
    assert found.state == "note" and re.search(r"each media worker loads torch, which takes \d{2,} MiB", found.says)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, found = findings("--port", str(port))
    assert code == 1 and found["port"]["state"] == "bad" and str(port) in found["port"]["says"]


@pytest.mark.parametrize(
    ("free", "state"), [(OBJECT_STORE_BYTES, "ok"), (OBJECT_STORE_BYTES - 1, "note"), (None, "note")]
)
def test_shared_memory_is_for_rays_objects(monkeypatch, free, state):
    """`free`: None if there is none. Caches are elsewhere, so a server works without."""

    def usage(_):
        if free is None:
            raise FileNotFoundError(2, "No such file or directory")
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    found = doctor._shared_memory()
    assert found.state == state and "cache" not in found.says
    assert ("Ray, if it is used, takes 80 MiB of the temporary directory" in found.says) == (state == "note")


@pytest.mark.parametrize(("busy", "n", "state"), [(0.2, 2, "ok"), (1.5, 64, "ok"), (1.0, 2, "note"), (9.0, 64, "note")])
def test_other_processes_that_compute_are_noted(monkeypatch, busy, n, state):
    monkeypatch.setattr(machine, "busy_cores", lambda _: busy)
    monkeypatch.setattr(machine, "n_cores", lambda: n)
    found = doctor._others()
    assert found.state == state and found.says.startswith(f"{busy:.1f} cores were busy")


@pytest.mark.parametrize(
    ("nodes", "text", "state"),
    [(2, "1\n", "note"), (2, "0\n", "ok"), (1, "1\n", "ok"), (2, None, "ok"), (0, None, "ok")],
)
def test_pages_that_the_kernel_moves_are_noted(monkeypatch, tmp_path, nodes, text, state):
    for i in range(nodes):
        (tmp_path / f"node{i}").mkdir()
    balancing = tmp_path / "numa_balancing"
    if text is not None:
        balancing.write_text(text)
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    monkeypatch.setattr(doctor, "_NUMA_BALANCING", balancing)
    found = doctor._numa()
    assert found.state == state and ("sysctl -w kernel.numa_balancing=0" in found.says) == (state == "note")


@pytest.mark.parametrize(("soft", "hard", "state"), [(1024, 20_000, "ok"), (65_536, 65_536, "ok"), (512, 1024, "note")])
def test_few_open_files_are_noted(monkeypatch, soft, hard, state):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(machine, "raise_open_files", lambda: hard)
    found = doctor._open_files()
    assert found.state == state and found.says.startswith(str(hard)) and ("soft limit" in found.says) == (soft < hard)


@pytest.mark.parametrize(("n", "says"), [(1, "1 core of "), (2, "2 cores of ")])
def test_one_core_is_one_core(monkeypatch, n, says):
    monkeypatch.setattr(machine, "n_cores", lambda: n)
    assert doctor._machine().says.startswith(says)


def test_a_server_that_does_not_start_is_a_finding():
    found = doctor._tried("server", {"chat_template": "nowhere.jinja"}, "a server")
    assert found.state == "bad" and "nowhere.jinja" in found.says


def test_in_words_and_the_version():
    said = CliRunner().invoke(app, ["doctor", "--no-serve", "--port", "0"])
    assert said.exit_code == 0 and "hydrainfer serve" in said.output and "shared memory" in said.output
    lines = said.output.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("...  measuring CPU kernels"))
    assert "CPU kernels: " in lines[at + 1], "what takes long is said before it begins"
    assert CliRunner().invoke(app, ["--version"]).output.split() == ["hydrainfer", __version__]


def test_a_gpu_that_cannot_be_used_is_a_finding(monkeypatch):
    def full(_):
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    found = next(doctor._devices())
    assert found.state == "bad" and found.says == "0: H100, which cannot be used (CUDA error: out of memory)"


@pytest.mark.parametrize("mps", [False, True])
def test_the_doctor_reports_a_gpu_and_why_parts_are_not_used(monkeypatch, tmp_path, mps):
    """FlashInfer and the compiler are tried, as when a server starts; why one is not used is a note."""
    gib = 1 << 30
    if mps:
        (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(select, "cuda_kernels", lambda: (None, ("no nvcc found (CUDA_HOME)",)))
    monkeypatch.setattr(select, "find_flashinfer", lambda *_: (None, ("FlashInfer does not work here (no ninja)",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 80 * gib))
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        gpu, sharing, kernels = doctor._devices()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
    assert gpu.says == "0: H100, 80 GiB, 70 of them free"
    assert sharing.says.startswith("MPS runs" if mps else "no MPS")
    assert kernels.state == "note" and "no ninja" in kernels.says and "no nvcc" in kernels.says


# ---- the shared store


def test_a_store_is_tried_and_what_was_written_is_removed(tmp_path):
    place = f"dir:{tmp_path}/blocks"
    ((state, says),) = stores(f"{place}?gib=0.1")
    assert state == "ok"
    assert re.fullmatch(
        rf"{place}: 0.00 of 0.10 GiB in use; blocks just written are read at \S+ GiB/s; "
        r"\S+ GiB of the disk are free; it can be read and written",
        says,
    )
    assert summary(tmp_path / "blocks") == []


def test_a_limit_beyond_the_disk_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 30))
    ((state, says),) = stores(f"dir:{tmp_path}/blocks?gib=4")
    assert state == "note" and says.endswith(
        "3.00 GiB of the disk are free, which is less than the limit allows: lower gib"
    )
    assert stores(f"dir:{tmp_path}/blocks?gib=2")[0][0] == "ok"


def test_each_place_of_a_store_is_a_finding(tmp_path):
    (tmp_path / "file").touch()
    away = f"redis://127.0.0.1:{free_port()}"
    (_, folder), file, server = stores(f"dir:{tmp_path}/blocks,dir:{tmp_path}/file,{away}")
    assert folder.startswith(f"dir:{tmp_path}/blocks: ")
    assert file == ("bad", f"dir:{tmp_path}/file: no folder")
    assert server[0] == "note"
    assert server[1] == f"{away} cannot be reached: Connection refused; a server starts without it, and tries again"
    assert stores("dir:/x?gib=ten") == [("bad", "dir: gib must be a positive number, such as dir:/path?gib=50")]


@pytest.mark.parametrize(
    ("limit", "options", "full", "state", "end"),
    [
        (
            4 << 30,
            "",
            "",
            "ok",
            "1.00 of 4.00 GiB in use; blocks just written are read at 2 GiB/s; it can be read and written",
        ),
        (None, "?ttl_s=9", "", "ok", "; it can be read and written"),
        (
            None,
            "",
            "",
            "note",
            "; nothing removes old blocks: set maxmemory and an eviction policy there, or ttl_s here",
        ),
        (4 << 30, "", "no memory", "note", "; blocks are read, but none are written: no memory"),
    ],
)
def test_a_server_as_a_store(limit, options, full, state, end):
    (place,) = parse_places(f"redis://host{options}")
    found = doctor._opened(place, Contents(5, 1 << 30, limit), Trial(0.5 / (1 << 30), full))
    assert found.state == state and found.says.startswith("redis://host:6379: 1.00 ") and found.says.endswith(end)


def test_the_store_comes_from_flag_variable_file_or_layout(tmp_path, monkeypatch):
    def examine(port, serve, stores, begins):
        asked.append(list(stores))
        return iter(())

    monkeypatch.setattr("hydrainfer.doctor.examine", examine)
    monkeypatch.delenv("HYDRAINFER_STORE", raising=False)
    (tmp_path / "layout.yaml").write_text("instances: [{role: EP}, {role: D, store: 'dir:/own'}]")
    (tmp_path / "serve.yaml").write_text(f"store: dir:/file\nlayout: {tmp_path}/layout.yaml\n")
    asked = []
    run = CliRunner().invoke
    run(app, ["doctor"])
    run(app, ["doctor", "--config", str(tmp_path / "serve.yaml")])
    monkeypatch.setenv("HYDRAINFER_STORE", "dir:/variable")
    run(app, ["doctor"])
    run(app, ["doctor", "--store", "dir:/flag"])
    assert asked == [[], ["dir:/file", "dir:/own"], ["dir:/variable"], ["dir:/flag"]]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "qwen3.5-9b",
            {
                "model": "qwen3.5-9b is served: Qwen3_5ForConditionalGeneration, 32 layers, bfloat16, 17.5 GiB",
                "cache kv": "32,768 bytes per token, 8 layers",
                "cache state": "51,511,296 bytes per request",
                "pictures": "one of 1024 x 768 is 768 tokens; videos, too",
            },
        ),
        ("gemma-3-4b", {"cache kv.1024": "of the last 1,024 tokens, 29 layers", "pictures": "256 tokens; no videos"}),
        ("llama-3.1-8b", {"context": "131,072 tokens", "pictures": "text only"}),
    ],
)
def test_a_model_that_is_served(model, says):
    """From its configuration alone."""
    code, found = findings(model)
    assert code == 0 and not {"machine", "port"} & set(found)
    assert all(part in found[name]["says"] for name, part in says.items())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json is missing"),
        ({"adapter_config.json": "{}"}, "holds a LoRA adapter, which is not served; merge it"),
        ({"params.json": "{}"}, "Mistral's params.json and no config.json"),
        ({"b-Q4.gguf": "", "a-Q4.gguf": ""}, "name one of them, e.g. a-Q4.gguf"),
        ({"model.onnx": ""}, "ONNX files, which are not served"),
        ({"config.json": '{"architectures": ["InternVLChatModel"], "auto_map": {}}'}, "ends with -hf"),
        ({"config.json": '{"architectures": ["Qwen9ForCausalLM"]}'}, "nearest: Qwen"),
    ],
)
def test_a_model_that_is_not_served(tmp_path, files, says):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    code, found = findings(str(tmp_path))
    assert code == 1 and list(found) == ["model"]
    assert says in found["model"]["says"] and "\n" not in found["model"]["says"]

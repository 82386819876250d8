"""Models by name: from the Hugging Face cache, from the hub, or one line that says how to fetch them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

import hydrainfer
from hydrainfer import LLM, SamplingParams, builtin
from hydrainfer.checkpoint import locate, locate_description, locate_model, name_of
from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from tests.checkpoints_text import make_text
from tests.parts import parts

pytestmark = pytest.mark.cpu
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("sharded"), "llama", shards=3)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(hub, checkpoint, name="owner/tiny", ref="main"):
    """As `hf download` leaves it."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    shutil.copytree(checkpoint, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / ref).write_text(COMMIT)
    return snapshot


def test_a_name_is_found_in_the_cache(hub, checkpoint):
    snapshot = keep(hub, checkpoint)
    assert locate("owner/tiny") == locate("owner/tiny", revision=COMMIT) == locate_model("owner/tiny") == snapshot
    assert name_of(snapshot) == "tiny"
    with LLM("owner/tiny", threads=1) as llm:
        assert parts(llm).name == "owner/tiny"
        assert llm.generate("one two", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./models/nothing", "no such directory; pass a Hugging Face checkpoint directory"),
        ("empty", "config.json is missing; pass a Hugging Face checkpoint directory"),
        ("empty/model.safetensors", "is one file of a checkpoint; pass the directory that it is in"),
        ("README.md", "is a file, but no GGUF file"),
        ("gone.gguf", "no such file"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_what_a_model_has(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for file in ("README.md", "empty/model.safetensors"):
        (tmp_path / file).write_text("# A model")
    with pytest.raises(CheckpointError, match=says):
        read_config(locate(name))


def test_the_built_in_model_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "builtin").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("builtin") == locate_model("builtin") == builtin.MODEL
    assert locate("./builtin").resolve() == tmp_path / "builtin"
    with pytest.raises(CheckpointError, match="takes no --revision"):
        locate("builtin", revision="main")


REFUSED = """
import sys
from hydrainfer.cli import app
from hydrainfer.core import HydraError
for words in (["serve"], ["demo"], ["profile", "--devices", "1"], ["bench", "compare", "--layouts", "1EPD"]):
    for model in ("owner/nothing", "./nothing", "empty"):
        try:
            app([*words, model], standalone_mode=False)
        except HydraError as e:
            print(words[-1], model, e)
print(sorted({"torch", "transformers", "ray", "fastapi"} & set(sys.modules)))
"""


def test_a_wrong_model_is_refused_before_what_takes_seconds_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(hydrainfer.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    *refused, imported = said.splitlines()
    assert len(refused) == 12 and imported == "[]", said


def test_a_revision_is_one_of_that_name(hub, checkpoint):
    keep(hub, checkpoint, ref="v1")
    assert locate("owner/tiny", revision="v1").name == COMMIT
    with pytest.raises(CheckpointError, match="hf download owner/tiny --revision v2"):
        locate("owner/tiny", revision="v2")
    with pytest.raises(CheckpointError, match="takes no --revision, which is for names on the Hugging Face hub"):
        locate(str(checkpoint), revision="v1")


def test_without_a_network_the_error_says_how_to_fetch_it(hub):
    with pytest.raises(CheckpointError) as e:
        locate("llava-hf/llava-1.5-7b-hf")
    assert e.value.message == (
        f"llava-hf/llava-1.5-7b-hf is no directory, and not in the Hugging Face cache ({hub}); it was not fetched: "
        "HF_HUB_OFFLINE is set. Where there is a network: hf download llava-hf/llava-1.5-7b-hf"
    )


class _Unreachable(ConnectionError):
    pass


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (_Unreachable("no route"), "the hub cannot be reached"),
        (type("GatedRepoError", (OSError,), {})("403"), "its owner wants you to ask for it on the hub first"),
        (type("RepositoryNotFoundError", (OSError,), {})("404"), "the hub has no model of that name"),
        (type("RevisionNotFoundError", (OSError,), {})("404"), "the hub has no such revision of it"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_why_the_hub_gave_nothing_is_said(hub, monkeypatch, error, why):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def fail(*_, local_files_only, **__):
        raise FileNotFoundError if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=why) as e:
        locate("owner/tiny")
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    "missing",
    ["model-00002-of-00003.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"],
)
def test_files_that_the_hub_cache_lacks_are_fetched_and_no_unneeded_ones(hub, sharded, monkeypatch, missing):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    snapshot = keep(hub, sharded)
    file = snapshot / missing
    held = file.read_bytes()
    file.unlink()  # a download that was cut off
    asked = []

    def download(model, *, revision, allow_patterns, ignore_patterns, local_files_only):
        asked.append(local_files_only)
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        if not local_files_only:
            file.write_bytes(held)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/tiny") == locate("owner/tiny") == snapshot
    assert asked == [True, False, True]


def test_folders_of_a_repository_are_fetched_only_for_their_templates(hub, checkpoint, monkeypatch):
    keep(hub, checkpoint)
    published = [
        *("config.json", "model.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
        *("additional_chat_templates/tool_use.jinja", "original/params.json", "onnx/model.safetensors"),
    ]
    fetched, download = [], huggingface_hub.snapshot_download

    def note(model, *, allow_patterns, ignore_patterns, **options):
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        fetched.extend(huggingface_hub.utils.filter_repo_objects(published, **patterns))
        return download(model, **patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", note)
    assert locate("owner/tiny")
    assert fetched == ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]


def test_a_directory_goes_before_a_name(hub, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = shutil.copytree(checkpoint, tmp_path / "owner" / "tiny")
    assert locate("owner/tiny").resolve() == here
    with pytest.raises(CheckpointError, match="no such directory; pass a Hugging Face checkpoint directory, a GGUF"):
        read_config(locate("owner/tiny/nothing"))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"quant_method": "awq", "bits": 4}, "its weights are quantised by awq in 4 bits, which is not supported"),
        ({"quant_method": "gptq", "bits": 8}, "by gptq in 8 bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt, which"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "by compressed-tensors, which"),
        ({"load_in_4bit": True}, "by an unknown method"),
        ("?", "by an unknown method"),
    ],
)
def test_quantised_checkpoints_are_named_in_the_refusal(checkpoint, tmp_path, content, wanted):
    path = shutil.copytree(checkpoint, tmp_path / "quantised")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": content}))
    with pytest.raises(CheckpointError) as e:
        read_config(path)
    assert wanted in e.value.message and "--quantization int8" in e.value.message


def test_what_describes_a_model_is_fetched_alone(hub, checkpoint, monkeypatch):
    """Without weights and tokenizer, which `locate` needs."""
    asked = []

    def fetch(model, *, revision, allow_patterns, ignore_patterns, local_files_only):
        asked.append((model, allow_patterns, local_files_only))
        return str(snapshot)

    snapshot = keep(hub, checkpoint)
    for file in snapshot.iterdir():
        if file.name != "config.json":
            file.unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate_description("owner/tiny") == snapshot
    ((_, patterns, local),) = asked
    assert local and not any("safetensors" in p or "tokenizer" in p or p == "*.json" for p in patterns)
    with pytest.raises(CheckpointError, match="it was not fetched"):
        locate("owner/tiny")

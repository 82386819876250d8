"""Instances whose caches are not alike do not start: requests could not move between them."""

import os

import msgspec
import pytest
import torch

from hydrainfer.assemble import instances, start_instance
from hydrainfer.cluster.launch import InProcess
from hydrainfer.config import MachineShare, ServeConfig, read_layout
from hydrainfer.core import ConfigError
from hydrainfer.families import read_config
from tests.checkpoints_qwen import make_qwen
from tests.cluster.processes import memories

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_qwen("qwen3_5", tmp_path_factory.mktemp("states")))


@pytest.mark.parametrize("other", [{"elastic_memory": False}, {"block_tokens": 32}, {"dtype": "bfloat16"}])
def test_blocks_of_other_sizes(checkpoint, other, monkeypatch):
    def own(config, spec):
        return msgspec.structs.replace(config, **other) if spec.name == "D0" else config

    monkeypatch.setattr(instances, "own_options", own)
    layout = {"layout": "1EP1D", "launcher": "inproc", "dtype": "float32", "media_workers": 0}
    with pytest.raises(ConfigError, match=r"instance D0 cannot join: blocks of its cache '\w+' have \d+ bytes.*--elas"):
        start_instance(ServeConfig(model=checkpoint, **layout))
    assert memories([os.getpid()]) == (set(), set()), "what the refused one had is given back"


def test_instances_of_one_process_share_its_gpu(checkpoint, monkeypatch):
    """Nothing is placed, so nothing needs Ray; each has an equal part of the memory."""

    class Stop(Exception):
        pass

    def hub(side, mesh, launcher, *rest):
        assert isinstance(launcher, InProcess)
        raise Stop

    shares = []
    monkeypatch.setattr(instances, "torch_device", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(instances, "own_options", lambda config, spec: shares.append(spec.share) or config)
    monkeypatch.setattr(instances, "Hub", hub)
    config = ServeConfig(model=checkpoint, layout="1E1P1D", launcher="inproc", dtype="bfloat16")
    described = read_config(checkpoint)
    with pytest.raises(Stop):
        instances.start_cluster(config, described, read_layout("1E1P1D"), 64, (), None, None, None)
    assert [share.gpus or share.of_memory(3) for share in shares] == [1 / 3] * 3


@pytest.mark.parametrize("mps", [False, True])
def test_processes_that_take_turns_on_a_gpu_are_named_at_the_start(mps, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if mps:
        (tmp_path / "control").touch()
    config = ServeConfig(model="m")
    for gpus in (1.0, 0.5):
        caplog.clear()
        specs = [spec._replace(share=MachineShare(gpus=gpus)) for spec in read_layout("1E1P1D")]
        _, folder = instances._launcher_of(config, specs, {}, by_ray=True)
        folder.remove()
        assert ("take turns" in caplog.text) is (gpus < 1.0 and not mps)


def test_facts_that_differ_name_their_instances():
    facts = {
        "E0": {"threads": 1, "image_cache_gib": 0.5, "matrix_products": "a\nb"},
        "D0": {"threads": 1, "kv_cache_gib": 0.1, "matrix_products": "c\nd", "kv_tokens": 9},
        "D1": {"threads": 1, "kv_cache_gib": 0.1, "matrix_products": "c\nd", "kv_tokens": 9},
    }
    assert instances._together(facts) == {
        "threads": "1 for each of 3 instances",
        "image_cache_gib": "0.5",
        "kv_cache_gib": "0.1 for each of 2 instances",
        "matrix_products": "D0, D1: c\nd\nE0: a\nb",
    }

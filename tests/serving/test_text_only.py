"""A model without a vision tower, behind HTTP and in layouts: what it says of itself, and of pictures."""

from __future__ import annotations

import httpx
import pytest
from rich.console import Console

from hydrainfer import LLM, SamplingParams
from hydrainfer.config import load
from hydrainfer.core import ConfigError, InvalidRequest
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
COSTS = """# invented
encode_image_s: 1.0e-3
step_base_s: 1.0e-3
prefill_token_s: 1.0e-6
decode_token_s: 1.0e-6
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"), "qwen3")


@pytest.mark.parametrize("layout", ["1EPD", "1P1D"])
def test_behind_http(path, layout, capsys):
    console = Console(width=200)
    loaded = load({"model": str(path), "port": 0, "layout": layout, "launcher": "inproc", "native_kernels": False})
    with (
        serve_in_background(loaded, console) as (url, instance),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        shown = capsys.readouterr().out
        assert "kv_cache_gib" in shown
        assert instance.facts["served_model_name"] == path.name and "image_cache_gib" not in instance.facts
        assert http.get("/health").json() == {"status": "ok"}
        (card,) = http.get("/v1/models").json()["data"]
        assert card["id"] == path.name
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        body["messages"][0]["content"] = [{"type": "text", "text": "What is this?"}, PICTURE]
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/instances").status_code == 200
        for pool in instance.pools().values():
            assert [*pool.usage()] == ["kv"]
            pool.check(idle=True)


@pytest.mark.parametrize("layout", ["1EPD", "1P1D"])
def test_on_an_emulated_device(path, tmp_path, layout):
    (tmp_path / "costs.yaml").write_text(COSTS)
    device = {"device": "emulated", "cost_model": str(tmp_path / "costs.yaml")}
    with LLM(path, layout=layout, launcher="inproc", **device) as llm:
        (out,) = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=5), use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 5
        with pytest.raises(InvalidRequest, match="text only"):
            llm.chat([{"role": "user", "content": [PICTURE]}], SamplingParams(max_tokens=5), use_tqdm=False)


@pytest.mark.parametrize("layout", ["1E1PD", "1E1P1D", "1E1EPD"])
def test_an_instance_that_would_only_encode_is_refused_in_one_line(path, layout):
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM takes text only, so E0 .*nothing to do") as caught:
        LLM(path, layout=layout, launcher="inproc")
    assert "\n" not in caught.value.message


def test_a_model_that_sees_needs_an_encoder(tmp_path):
    with pytest.raises(ConfigError, match="no instance that runs encode, which LlavaForConditionalGeneration needs"):
        LLM(make_llava(tmp_path), layout="1P1D", launcher="inproc")

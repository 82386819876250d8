"""Options of `vllm bench serve` are those of `bench run`, or say what comes nearest."""

import pytest

from hydrainfer.benching.vllm_names import ours
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("http://x:1 --rate 2 --seed 3", "http://x:1 --rate 2 --seed 3"),
        ("--base-url http://x:1 --num-prompts 50 --request-rate 4", "http://x:1 --requests 50 --rate 4"),
        ("--host x --port 81 --max-concurrency 8 --model m", "http://x:81 --model m --concurrency 8"),
        ("--port 81 --burstiness 0.5 --label a", "http://127.0.0.1:81 --arrivals gamma --burst-shape 0.5 --name a"),
        ("--backend openai-chat --endpoint /v1/chat/completions --result-dir out", "--out out"),
        ("--goodput ttft:250 tpot:40 --save-result --percentile-metrics ttft,tpot", "--goodput ttft:250 tpot:40"),
    ],
)
def test_options_are_ours(line, wanted):
    words, notes = ours(line.split())
    assert " ".join(words) == wanted
    assert len(notes) == line.count("--backend") + line.count("--endpoint") + line.count("--save") + line.count("ile-m")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--request-rate inf", "--concurrency says how many"),
        ("--dataset-name random --random-input-len 512", "--workload says what is sent"),
        ("--backend vllm", "the chat API is measured"),
        ("--temperature 0.7", "requests are greedy"),
        ("--num-prompts", "needs a value"),
    ],
)
def test_others_say_what_comes_nearest(line, says):
    with pytest.raises(ConfigError, match=says):
        ours(line.split())

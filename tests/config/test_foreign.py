"""Options of vLLM: each is one of ours, sets nothing with a note, or is refused with what comes nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrainfer.config import load, of_vllm, options
from hydrainfer.config.vllm_names import NAMES, THE_SAME
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.cpu
LISTED = (Path(__file__).parent / "vllm_serve_options.txt").read_text().split()
"""All options that `vllm serve --help=all` of vLLM 0.32 lists."""


def loaded(line: str):
    rest, given = of_vllm(line.split())
    assert not rest, rest
    return load(given)


def test_every_option_of_vllm_has_a_meaning():
    ours = {o.name for o in options()} | {"config"}
    for option in LISTED:
        name = option.removeprefix("--").replace("-", "_")
        assert name in NAMES or name in THE_SAME, option
        assert name in NAMES or name in ours, option
    assert all({*meaning.ours} <= ours for meaning in NAMES.values())


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--max-num-seqs 8", {"max_running": 8}),
        ("--max-num-batched-tokens=8k", {"token_budget": 8000}),
        ("--max-model-len 4K", {"max_model_len": 4096}),
        ("--max-model-len -1", {"max_model_len": None}),
        ("--enforce-eager", {"cuda_graphs": False}),
        ("--no-enforce-eager", {"cuda_graphs": True}),
        ("--no-enable-prefix-caching", {"prefix_cache": False}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--quantization int8", {"quantization": "int8"}),
        ("-dp 3", {"layout": "3EPD"}),
        ("--model some/model", {"model": "some/model"}),
        ('--limit-mm-per-prompt {"image":4,"video":{"count":1,"width":32}}', {"max_images": 4, "max_videos": 1}),
        ("--limit-mm-per-prompt.image 3 --limit-mm-per-prompt.video 0", {"max_images": 3, "max_videos": 0}),
        ('--limit-mm-per-prompt {"image":1} --limit-mm-per-prompt.video 1', {"max_images": 1, "max_videos": 1}),
        ("--mm-processor-cache-gb 4", {"media_memory_mib": 4096.0, "pixel_memory_mib": 4608.0}),
        ("--language-model-only", {"max_images": 0, "max_videos": 0}),
        ("--kv-cache-memory-bytes 3G", {"kv_cache_gib": 3.0}),
        ("--mm-processor-cache-gb 0.5", {"media_memory_mib": 512.0}),
        (
            '--allowed-origins ["https://a.example","https://b.example"]',
            {"allowed_origins": "https://a.example,https://b.example"},
        ),
        ("--disable-uvicorn-access-log --uvicorn-log-level critical", {"access_log": False, "log_level": "error"}),
        ("--disable-log-stats", {"stats_s": 0}),
        ("--scheduling-policy fcfs", {"order": "fcfs"}),
        ("--distributed-executor-backend mp", {"launcher": "auto"}),
        ('-sc {"method":"ngram","num_speculative_tokens":5}', {"drafts": "ngram", "max_drafts": 5}),
        ('--speculative-config {"model":"small"}', {"drafts": "model", "draft_model": "small"}),
        ("--spec-method qwen3_next_mtp --spec-tokens 2", {"drafts": "mtp", "max_drafts": 2}),
        ("--tool-call-parser openai", {"tool_call_parser": "harmony"}),
        ("--reasoning-parser deepseek_r1", {"reasoning_parser": "think"}),
        ("--tool-call-parser hermes", {"tool_call_parser": "hermes"}),
        ("--gpu-memory-utilization 0.5 --block-size 32", {"gpu_memory_fraction": 0.5, "block_tokens": 32}),
    ],
)
def test_an_option_of_vllm_sets_ours(line, wanted):
    found = loaded(line)
    assert {name: getattr(found.config, name) for name in wanted} == wanted
    assert not found.notes
    assert {found.provenance[name] for name in wanted} <= {"flag", "default"}


def test_several_words_are_one_value_when_the_model_stands_first():
    rest, given = of_vllm(["m", "--served-model-name", "a", "b", "--allowed-media-domains", "x.org", "y.org"])
    assert rest == ["m"]
    found = load(given).config
    assert (found.served_model_name, found.media_domains) == ("a,b", "x.org,y.org")
    rest, given = of_vllm(["--served-model-name", "a", "m", "--port", "9"])
    assert (rest, given) == (["m", "--port", "9"], {"served_model_name": "a"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--trust-remote-code", "never run"),
        ("--tensor-parallel-size 1", "one device"),
        ("--enable-chunked-prefill", "always computed in chunks"),
        ("--load-format auto", "safetensors"),
        ("--kv-cache-dtype auto", "dtype of the model"),
        ("-O3 --seed 7 --attention-backend FLASHINFER", "kernels are chosen"),
        ("--enable-auto-tool-choice --swap-space 0", "always on"),
        ("--quantization fp8", "read where a checkpoint has them"),
        ('--limit-mm-per-prompt {"audio":0}', "--max-images"),
        ("--no-enable-expert-parallel", "experts"),
    ],
)
def test_what_means_nothing_here_is_said(line, says):
    notes = loaded(line).notes
    assert any(says in note for note in notes) and all("(flag)" in note for note in notes)
    assert loaded(line).config == load({}).config


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--tensor-parallel-size 2", "tensor_parallel_size (flag) is vLLM's and not to be had here: an instance"),
        ("--no-enable-chunked-prefill", "--token-budget"),
        ("--enable-lora", "merge them"),
        ("--kv-cache-dtype fp8", "dtype of the model"),
        ("--kv-transfer-config {}", "--layout"),
        ("--max-logprobs 50", "up to 20"),
        ("--swap-space 4", "--host-cache-gib"),
        ("--max-num-seqs many", "max_num_seqs (flag), an option of vLLM: it must be a whole number"),
        ("--max-num-seqs 2.9", "it must be a whole number, such as 4096, 32k or 32K"),
        ("--max-num-seqs 0", "max_running (flag): must be a whole number of at least 1"),
        ("--scheduling-policy priority", "in vLLM one of a lower, so turn the sign"),
        ("--enforce-eager.x 1 --enforce-eager.x.y 2", "--enforce-eager.x does not fit what else is given"),
        (
            "-sc {} --speculative-config.a 1 --speculative-config.a.b 2",
            "--speculative-config.a.b does",
        ),
        ("--limit-mm-per-prompt 4", "must be an object"),
        ('--limit-mm-per-prompt {"audio":1}', "no audio is taken"),
        ("--limit-mm-per-prompt {", "limit_mm_per_prompt (flag)"),
        ("--limit-mm-per-prompt image=4,video=1", 'it must be an object, such as {"image": 4}'),
        ('--speculative-config {"method":"eagle","model":"m"}', "method 'eagle' is not supported"),
        ('--speculative-config {"method":"ngram","quantization":"fp8"}', "quantization cannot be set"),
        ("--language-model-only --limit-mm-per-prompt.image 3", "(flag) both set max_images; give one"),
        ("--max-num-seqs 8 --max-running 9", "max_running and max_num_seqs (flag) both set max_running; give one"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--max-num-seqs --enforce-eager", "--max-num-seqs needs a value"),
    ],
)
def test_what_is_not_to_be_had_is_refused_with_what_comes_nearest(line, says):
    with pytest.raises(ConfigError) as e:
        rest, given = of_vllm(line.split())
        load(dict(zip([word.removeprefix("--").replace("-", "_") for word in rest[::2]], rest[1::2])) | given)
    assert says in e.value.message and "\n" not in e.value.message


def test_several_keys_are_refused_without_showing_them():
    _, given = of_vllm(["m", "--api-key", "secret-one", "secret-two"])
    with pytest.raises(ConfigError, match="--tenants") as e:
        load(given)
    assert "secret" not in e.value.message


def test_none_is_the_default_of_most_options_there():
    names = [name for name, meaning in NAMES.items() if meaning.ours and name not in meaning.ours]
    assert load(dict.fromkeys(names)).config == load({}).config
    assert load({"dtype": "auto", "max_model_len": None, "served_model_name": None}).config == load({}).config


def test_files_the_environment_and_python_take_the_names_too(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("max-num-seqs: 5\nroot-path: /x\nlimit-mm-per-prompt:\n  image: 2\ntrust-remote-code: true\n")
    found = load({"tensor_parallel_size": 1}, file, {"HYDRAINFER_ENFORCE_EAGER": "true"}, given="argument of LLM")
    assert (found.config.max_running, found.config.max_images, found.config.cuda_graphs) == (5, 2, False)
    assert found.provenance["max_running"] == str(file) and found.config.root_path == "/x"
    assert [note.split(" is vLLM's")[0] for note in found.notes] == [
        f"trust_remote_code ({file})",
        "tensor_parallel_size (argument of LLM)",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_num_sqs", "max_num_seqs"),
        ("max-num-batched-token", "max_num_batched_tokens"),
        ("max_runing", "max_running"),
    ],
)
def test_a_misspelt_name_is_taken_for_the_nearest_of_both(key, meant):
    with pytest.raises(ConfigError) as e:
        load({key: 2}, given="argument of LLM")
    assert e.value.message.endswith(f"did you mean {meant}?")

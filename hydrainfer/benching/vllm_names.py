"""The options of `vllm bench serve` 0.32, and what each is for `bench`. `config.vllm_names` has those of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrainfer.config import Name, Options, Spelling, adopt, gathered

_SENT = "--workload says what is sent: a name or file of configs/workloads, or a recording (hydrainfer trace)"
_KEPT = "--out FOLDER keeps the result, a table of runs and a page"
_SHOWN = "all latencies are told as p50, p90 and p99"


def _rate(value: Any) -> Options:
    if str(value) == "inf":
        raise ValueError("all at once is no load that lasts; --concurrency says how many clients ask at once")
    return {"rate": value}


def _address(value: Any) -> Options:
    return {"urls": str(value)}


def _burst(value: Any) -> Options:
    return {"arrivals": "gamma", "burst_shape": value}


def _idle(words: str, says: str) -> dict[str, Name]:
    return dict.fromkeys(words.split(), Name(says, idle=True))


def _absent(words: str, says: str, *harmless: Any) -> dict[str, Name]:
    return dict.fromkeys(words.split(), Name(says, harmless=(False, *harmless)))


NAMES: dict[str, Name] = {
    "num_prompts": Name("`--requests`", ("requests",)),
    "request_rate": Name("`--rate`; not inf", ("rate",), _rate),
    "max_concurrency": Name("`--concurrency`", ("concurrency",)),
    "base_url": Name("the positional URL", ("urls",), _address),
    "burstiness": Name("`--arrivals gamma --burst-shape`", ("arrivals", "burst_shape"), _burst),
    "served_model_name": Name("`--model`", ("model",)),
    "label": Name("`--name`", ("name",)),
    "result_dir": Name("`--out`", ("out",)),
    **_absent("backend", "the chat API is measured", "openai-chat", "openai"),
    **_absent("endpoint", "the chat API is measured", "/v1/chat/completions"),
    **_absent(
        "dataset_name dataset_path input_len output_len random_input_len random_output_len random_range_ratio "
        "random_prefix_len random_batch_size sharegpt_output_len hf_name hf_subset hf_split hf_output_len "
        "custom_output_len random_mm_base_items_per_request random_mm_num_mm_items_range_ratio "
        "random_mm_limit_mm_per_prompt random_mm_bucket_config prefix_repetition_num_prefixes "
        "prefix_repetition_prefix_len prefix_repetition_suffix_len prefix_repetition_output_len",
        _SENT,
    ),
    **_absent(
        "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty",
        "requests are greedy, or as the workload says",
        0,
        "0.0",
    ),
    **_absent("extra_body header chat_template_kwargs lora_modules lora_assignment use_beam_search logprobs", _SENT),
    **_absent("ramp_up_strategy ramp_up_start_rps ramp_up_end_rps", "--rate 1,2,4 are loads one after the other"),
    **_absent("insecure", "certificates are checked"),
    **_absent("profile", "python -m benchmarks.b06_engine_cpu measures steps and kernels"),
    **_absent("no_stream", "answers are streamed: a TTFT is measured"),
    **_idle("save_result save_detailed append_result result_filename metadata plot_timeline plot_dataset_stats", _KEPT),
    **_idle("percentile_metrics metric_percentiles timeline_itl_thresholds", _SHOWN),
    **_idle("num_warmups ready_check_timeout_sec probe_request_rate", "a few requests are sent before the first run"),
    **_idle("ignore_eos", "answers are as long as the workload says, where the server takes ignore_eos"),
    **_idle("tokenizer tokenizer_mode skip_tokenizer_init skip_chat_template trust_remote_code", "the server counts"),
    **_idle("disable_tqdm disable_shuffle no_oversample enable_multimodal_chat request_id_prefix", "as always"),
}
_SPELLING = Spelling(
    bare=frozenset(
        (
            *("append_result", "disable_shuffle", "disable_tqdm", "enable_multimodal_chat", "ignore_eos", "insecure"),
            *("no_oversample", "no_stream", "plot_dataset_stats", "plot_timeline", "profile", "save_detailed"),
            *("save_result", "skip_chat_template", "skip_tokenizer_init", "trust_remote_code", "use_beam_search"),
        )
    ),
    several=frozenset(("header", "lora_modules", "metadata")),
    short={},
)


def ours(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a command line with options of `vllm bench serve` in the names of `bench run`, and a line for each
    that sets nothing here. Raises `ConfigError`."""
    places = {"host": Name("the positional URL", ("host",)), "port": Name("the positional URL", ("port",))}
    rest, given = gathered(words, NAMES | places, _SPELLING)
    host, port = given.pop("host", None), given.pop("port", None)
    if host is not None or port is not None:
        given["base_url"] = f"http://{host or '127.0.0.1'}:{port or 8000}"
    adopted = adopt(given, NAMES, "flag")
    first = [adopted.options.pop("urls")] if "urls" in adopted.options else []
    more = [word for name, value in adopted.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*first, *rest, *more], adopted.notes

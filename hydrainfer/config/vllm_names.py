"""The options of `vllm serve` 0.32, and some older ones, and what each is here. Offline, `LLM(...)` takes the same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydrainfer.config.foreign import Name, Options, gathered, listed, mapping, on, whole_number
from hydrainfer.config.vllm_spelling import SPELLING

_NO_PLUGINS = "a server runs no code but its own"
_LORA = "adapters (LoRA) are not supported; merge them into the checkpoint"
_ONE_DEVICE = "an instance computes on one device; --layout 2EPD makes two that share the requests"
_PLACES = "--layout says which instances there are, Ray (--ray-address) on which machines they run"
_KERNELS = "kernels are chosen at the start by what they take on this machine"
_STATES = "states of recurrent layers are kept in float32, in blocks of their own"
_GRAPHS = "graphs are captured for the sizes that batches have; --no-cuda-graphs turns them off"
_OFFLOADED = "weights stay on the device"
_DISAGGREGATED = "--layout says which instances encode, prefill and decode, such as 1E1P1D, --transport how blocks move"
_WITH_REQUESTS = "send it with each request"
_TRACES = "--otlp-endpoint has the stages of each request"
_PIXELS_MIB = 512.0  # of decoded pictures that requests hold, by default
_MEASURED = "/metrics has all that is measured"
_POOLING = "models generate text; embeddings and scores are not served"


def _alias(ours: str, says: str = "") -> Name:
    return Name(says or f"`--{ours.replace('_', '-')}`", (ours,))


def _names(words: str, name: Name) -> dict[str, Name]:
    return dict.fromkeys(words.split(), name)


def _idle(words: str, says: str) -> dict[str, Name]:
    return _names(words, Name(says, idle=True))


def _absent(words: str, says: str, *harmless: Any) -> dict[str, Name]:
    return _names(words, Name(says, harmless=(False, *harmless)))


def _chosen(ours: str, choices: Mapping[str, str], others: bool = False) -> Name:
    """Values with other names. `others`: those that are not named are ours, too."""

    def options(value: Any) -> Options:
        if value not in choices and not others:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return {ours: choices.get(value, value)}

    some = ", ".join(f"{theirs} is {mine}" for theirs, mine in choices.items())
    return Name(f"`--{ours.replace('_', '-')}`: {some}", (ours,), options)


def _quantization(value: Any) -> Options:
    read = ("fp8", "fbgemm_fp8", "mxfp4", "gguf")
    return {} if value in read else {"quantization": value}


def _most(value: Any) -> Options:
    """`limit_mm_per_prompt`, whose values may be objects with a count."""
    found, ours = Options(), {"image": "max_images", "video": "max_videos"}
    for kind, limit in mapping(value).items():
        count = limit.get("count", 999) if isinstance(limit, Mapping) else limit
        if kind in ours:
            found[ours[kind]] = count
        elif count:
            raise ValueError(f"no {kind} is taken; there are image and video")
    return found


def _drafts(value: Any) -> Options:
    given = dict(mapping(value))
    found = Options()
    if "num_speculative_tokens" in given:
        found["max_drafts"] = given.pop("num_speculative_tokens")
    model, method = given.pop("model", None), given.pop("method", "draft_model")
    if method in ("ngram", "suffix"):
        found["drafts"] = "ngram"
    elif str(method).endswith("mtp"):
        found["drafts"] = "mtp"
    elif method == "draft_model" and model:
        found |= {"drafts": "model", "draft_model": model}
    else:
        raise ValueError(f"method {method!r} is not supported; there are ngram, mtp and draft_model with its model")
    for bound in ("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"):
        given.pop(bound, None)
    if given:
        raise ValueError(f"{', '.join(given)} cannot be set; see --drafts and --draft-model")
    return found


def _spec_method(value: Any) -> Options:
    return {"drafts": "model"} if value == "draft_model" else _drafts({"method": value})


def _order(value: Any) -> Options:
    if value != "fcfs":
        raise ValueError(
            "it must be fcfs; with --order rank a request of a higher priority goes first, in vLLM one of a lower, so "
            "turn the sign in your clients"
        )
    return {"order": "fcfs"}


def _cached(value: Any) -> Options:
    mib = float(value) * 1024
    return {"media_memory_mib": mib} | ({"pixel_memory_mib": mib + _PIXELS_MIB} if mib > _PIXELS_MIB else {})


def _copies(value: Any) -> Options:
    return {"layout": f"{whole_number(value)}EPD"}


def _length(value: Any) -> Options:
    whole = value in (None, "auto", -1, "-1")
    return {"max_model_len": None if whole else whole_number(value)}


def _number(ours: str, per_unit: float = 1) -> Name:
    """A whole number, such as 32k, in other units."""

    def options(value: Any) -> Options:
        n = whole_number(value)
        return {ours: n if per_unit == 1 else n / per_unit}

    return Name(f"`--{ours.replace('_', '-')}`", (ours,), options)


def _key(value: Any) -> Options:
    if isinstance(value, list) and len(value) > 1:
        raise ValueError("it takes one key; --tenants names a file of several, each with limits")
    return {"api_key": value}


_MODEL: dict[str, Name] = {
    "model": _alias("model", "the positional MODEL"),
    "dtype": _chosen("dtype", {"half": "float16", "float": "float32"}, others=True),
    "quantization": Name(
        "`--quantization`; fp8, fbgemm_fp8, mxfp4 and gguf are read where a checkpoint has them",
        ("quantization",),
        _quantization,
    ),
    "max_model_len": Name("`--max-model-len`", ("max_model_len",), _length),
    "served_model_name": Name(
        "`--served-model-name`", ("served_model_name",), lambda value: {"served_model_name": listed(value)}
    ),
    "enforce_eager": Name("`--no-cuda-graphs`", ("cuda_graphs",), lambda value: {"cuda_graphs": not on(value)}),
    "disable_sliding_window": Name("windows are part of a model, and stay", harmless=(False,)),
    "hf_token": Name("set HF_TOKEN"),
    **_idle("trust_remote_code", "a checkpoint's own code is never run"),
    **_idle("use_tqdm_on_load pt_load_map_location allow_deprecated_quantization enable_cumem_allocator", "as always"),
    **_absent("download_dir", "set HF_HOME"),
    **_absent("tokenizer tokenizer_revision skip_tokenizer_init", "the tokenizer is the checkpoint's"),
    **_absent("tokenizer_mode", "the tokenizer is the checkpoint's", "auto", "hf", "fast"),
    **_absent("code_revision", "a checkpoint's own code is never run"),
    **_absent("hf_config_path hf_overrides rope_scaling rope_theta", "edit config.json of the checkpoint"),
    **_absent("config_format", "config.json is read", "auto", "hf"),
    **_absent("generation_config", "generation_config.json of the checkpoint gives the defaults", "auto"),
    **_absent("override_generation_config", _WITH_REQUESTS),
    **_absent("load_format", "safetensors and GGUF are read", "auto", "safetensors", "hf", "gguf"),
    **_absent("model_loader_extra_config ignore_patterns quantization_config", "a checkpoint is read as it is", "{}"),
    **_idle(
        "safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads "
        "max_parallel_loading_workers",
        "only the tensors are read that an instance's stages need",
    ),
    **_absent("model_impl", "layers are our own", "auto", "vllm"),
    **_absent("runner task", _POOLING, "auto", "generate"),
    **_absent("convert pooler_config", _POOLING, "auto", "none"),
    **_absent(
        "enable_lora lora_modules lora_dtype lora_target_modules default_mm_loras max_loras max_cpu_loras "
        "max_lora_rank max_lora_cls_labels enable_mixed_moe_lora_format enable_moe_shared_loras "
        "enable_tower_connector_lora fully_sharded_loras specialize_active_lora",
        _LORA,
    ),
    **_absent(
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names weight_transfer_config",
        "a server that sleeps or changes its weights is not supported; stop it and start another one",
    ),
    **_absent("diffusion_config engram_config", "models of this kind are not served"),
}
_SCHEDULER: dict[str, Name] = {
    "max_num_batched_tokens": _number("token_budget"),
    "max_num_seqs": _number("max_running"),
    "max_num_queued_reqs": _number("max_waiting"),
    "scheduling_policy": Name("`--order fcfs`; not priority, which counts the other way there", ("order",), _order),
    "speculative_config": Name(
        "`--drafts`, `--draft-model`, `--max-drafts`; `prompt_lookup_min`, `prompt_lookup_max` and "
        "`draft_tensor_parallel_size` set nothing",
        ("drafts", "draft_model", "max_drafts"),
        _drafts,
    ),
    "spec_method": Name("`--drafts`", ("drafts",), _spec_method),
    "spec_model": _alias("draft_model"),
    "spec_tokens": _number("max_drafts"),
    **_absent("max_num_queued_tokens", "--max-queue-s is the work that may wait, in seconds"),
    **_absent("max_num_active_seqs max_num_scheduled_tokens", "--max-running and --token-budget are the bounds"),
    **_idle(
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills "
        "max_long_partial_prefills disable_chunked_mm_input prefill_schedule_interval scheduler_reserve_full_isl "
        "num_scheduler_steps multi_step_stream_outputs use_v2_block_manager stream_interval",
        "--step-s bounds the time of a batch, and little work left goes first",
    ),
    "enable_chunked_prefill": Name("prompts are always computed in chunks, of --token-budget tokens", harmless=(True,)),
    **_absent("enable_trace_replay", "hydrainfer bench replays traces"),
}
_MEMORY: dict[str, Name] = {
    "gpu_memory_utilization": _alias("gpu_memory_fraction"),
    "device_memory_utilization": _alias("gpu_memory_fraction"),
    "kv_cache_memory_bytes": _number("kv_cache_gib", 2**30),
    "kv_offloading_size": _alias("host_cache_gib"),
    "block_size": _alias("block_tokens"),
    "enable_prefix_caching": _alias("prefix_cache"),
    "mm_processor_cache_gb": Name(
        "`--media-memory-mib`, and `--pixel-memory-mib` beyond it", ("media_memory_mib", "pixel_memory_mib"), _cached
    ),
    **_absent("num_gpu_blocks_override", "--kv-cache-gib is the size of the KV cache"),
    **_absent("swap_space", "nothing is swapped; --host-cache-gib is host memory for what the device evicts", 0),
    **_absent("kv_offloading_backend", "--host-cache-gib is host memory, --store outlives the server", "native"),
    **_absent("kv_cache_dtype", "caches have the dtype of the model", "auto"),
    **_absent("kv_cache_dtype_skip_layers kv_sharing_fast_prefill", "caches have the dtype of the model"),
    **_idle(
        "prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval", "prefixes have keys of their own"
    ),
    **_idle("disable_hybrid_kv_cache_manager swa_bounded_replay", "layers with windows have a cache of their own"),
    **_idle(
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_ssu_algorithm "
        "mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "use_replayssm replayssm_buffer_len",
        _STATES,
    ),
    **_absent(
        "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step cpu_offload_params "
        "offload_params",
        _OFFLOADED,
        0,
    ),
    **_absent("offload_backend", _OFFLOADED, "auto"),
}
_PICTURES: dict[str, Name] = {
    "limit_mm_per_prompt": Name("`--max-images`, `--max-videos`", ("max_images", "max_videos"), _most),
    "language_model_only": Name(
        "`--max-images 0 --max-videos 0`",
        ("max_images", "max_videos"),
        lambda value: {"max_images": 0, "max_videos": 0} if on(value) else {},
    ),
    "allowed_local_media_path": _alias("media_roots"),
    "allowed_media_domains": Name(
        "`--media-domains`", ("media_domains",), lambda value: {"media_domains": listed(value)}
    ),
    **_absent("mm_processor_kwargs", _WITH_REQUESTS, "{}"),
    **_absent("media_io_kwargs", "a request's mm_processor_kwargs have num_frames and fps", "{}"),
    **_absent("enable_mm_embeds enable_prompt_embeds", "pictures and prompts are taken, their embeddings are not"),
    **_absent("mm_encoder_only", _DISAGGREGATED),
    **_absent("video_pruning_method video_pruning_rate", "all tokens of a video are computed", 0),
    **_idle("interleave_mm_strings", "pictures stand in a prompt where they are in a message"),
    **_idle("skip_mm_profiling", "the size of caches comes from the model's shapes"),
    **_idle(
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc "
        "mm_ipc_gpu_memory_gb renderer_num_workers mm_device_do_normalize mm_processor_device",
        "--media-workers decode and resize pictures, and share their pixels by memory",
    ),
    **_idle(
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_tp_mode",
        _KERNELS,
    ),
}
_CLUSTER: dict[str, Name] = {
    "data_parallel_size": Name("`--layout`: 2 is 2EPD", ("layout",), _copies),
    "distributed_executor_backend": _chosen("launcher", {"ray": "ray", "mp": "auto", "uni": "inproc"}),
    **_absent("tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size", _ONE_DEVICE, 1),
    **_absent(
        "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate enable_hc_sp",
        _ONE_DEVICE,
        1,
    ),
    **_absent(
        "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy enable_ep_weight_filter "
        "all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo dbo_decode_token_threshold "
        "dbo_prefill_token_threshold ubatch_size",
        "experts are on the device of their instance",
    ),
    **_absent(
        "data_parallel_size_local data_parallel_rank data_parallel_start_rank data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
        "data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_failure_threshold "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval master_addr master_port "
        "headless device_ids",
        _PLACES,
    ),
    **_absent("nnodes", _PLACES, 1),
    **_absent("node_rank", _PLACES, 0),
    **_idle(
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_nccl_comm_suspend "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds enable_batch_sharded_sampling "
        "enable_shm_tensor_arena numa_bind numa_bind_nodes numa_bind_cpus ray_workers_use_nsight",
        "instances share nothing that must be set",
    ),
    **_absent("kv_transfer_config ec_transfer_config ec_manager_config", _DISAGGREGATED),
    **_absent("kv_events_config aux_output_config", "events of blocks are not published"),
    **_absent(
        "enable_fault_tolerance fault_tolerance_config enable_scale_out",
        "always on: a request goes on elsewhere when its instance is lost",
        True,
    ),
    **_absent("worker_cls worker_extension_cls scheduler_cls model_class_overrides additional_config", _NO_PLUGINS),
}
_SERVER: dict[str, Name] = {
    "api_key": Name("`--api-key`; several: `--tenants`", ("api_key",), _key),
    "allowed_origins": Name(
        "`--allowed-origins`", ("allowed_origins",), lambda value: {"allowed_origins": listed(value)}
    ),
    "disable_uvicorn_access_log": Name(
        "`--no-access-log`", ("access_log",), lambda value: {"access_log": not on(value)}
    ),
    "uvicorn_log_level": _chosen("log_level", {"critical": "error", "trace": "debug"}, others=True),
    "disable_log_stats": Name("`--stats-s 0`", ("stats_s",), lambda value: {"stats_s": 0} if on(value) else {}),
    "otlp_traces_endpoint": _alias("otlp_endpoint"),
    "shutdown_timeout": _alias("drain_s"),
    "tool_call_parser": _chosen("tool_call_parser", {"openai": "harmony", "qwen3_xml": "qwen3_coder"}, others=True),
    "reasoning_parser": _chosen(
        "reasoning_parser",
        {"deepseek_r1": "think", "qwen3": "think", "olmo3": "think", "openai_gptoss": "harmony", "kimi_k2": "kimi"},
        others=True,
    ),
    **_idle("enable_auto_tool_choice", "always on"),
    **_idle("enable_prompt_tokens_details", "usage always has the cached tokens"),
    **_idle("enable_request_id_headers", "every answer has X-Request-Id"),
    **_idle("enable_server_load_tracking", "/load always counts"),
    **_idle("disable_log_requests log_error_stack aggregate_engine_logging", "contents of requests are never logged"),
    **_absent("enable_log_requests enable_log_outputs enable_log_deltas max_log_len", "contents are never logged"),
    **_idle("disable_access_log_for_endpoints", "--no-access-log leaves out all lines"),
    **_absent("log_config_file logging_config", "--log-format and --log-level are there"),
    **_absent("chat_template_content_format", "a template is shown the parts of a message", "auto", "openai"),
    **_absent("default_chat_template_kwargs", "send chat_template_kwargs with each request", "{}"),
    **_absent("trust_request_chat_template", "a request may not set a chat template"),
    **_idle("trust_request_mm_kwargs", "a request's mm_processor_kwargs are checked"),
    **_absent("response_role", "answers have the role assistant", "assistant"),
    **_absent("exclude_tools_when_tool_choice_none", "the template is shown the tools of a request"),
    **_absent("enable_reasoning", "--reasoning-parser", True),
    **_absent("enable_force_include_usage", "send stream_options with include_usage"),
    **_absent("return_tokens_as_token_ids tokens_only", "send return_token_ids"),
    **_absent("enable_tokenizer_info_endpoint enable_offline_docs", "there is no such endpoint"),
    **_absent("disable_fastapi_docs", "the pages under /docs say what is in docs/api.md"),
    **_absent("max_logprobs", "a request gets up to 20", *range(21)),
    **_absent("logprobs_mode", "log-probabilities are of the model's own distribution", "raw_logprobs"),
    **_absent("return_sampling_mask enable_return_routed_experts enable_per_request_metrics", "send timings"),
    **_idle("guided_decoding_backend structured_outputs_config", "grammars are compiled by our own engine"),
    **_absent("reasoning_config", "--reasoning-parser says how reasoning is marked"),
    **_absent("api_server_count", "one process speaks HTTP", 1),
    **_idle("disable_frontend_multiprocessing", "one process speaks HTTP"),
    **_absent("uds", "the server listens on --host and --port"),
    **_absent("grpc grpc_port", "the server speaks HTTP"),
    **_absent("allow_credentials", "pages send their key as a bearer token"),
    **_absent("allowed_methods allowed_headers", "--allowed-origins is what can be set", '["*"]'),
    **_absent("ssl_cert_reqs", "with --ssl-ca-certs a client must have a certificate", 0),
    **_absent("ssl_ciphers enable_ssl_refresh", "TLS is OpenSSL's default; start the server again for new files"),
    **_idle("h11_max_header_count h11_max_incomplete_event_size sse_keep_alive_interval", "HTTP has fixed limits"),
    **_absent(
        "middleware tool_parser_plugin reasoning_parser_plugin io_processor_plugin logits_processors tool_server "
        "tool_strict_level",
        _NO_PLUGINS,
    ),
    **_absent("cohere_format cohere_is_reasoning_model anthropic_disabled_thinking_effort", "there is no such choice"),
    **_absent("fingerprint_mode fingerprint_value watermark watermark_config", "answers are not marked"),
    **_idle("seed", "a request's own seed makes it repeatable, whatever runs beside it"),
}
_MEASURING: dict[str, Name] = {
    **_idle("collect_detailed_traces", _TRACES),
    **_idle(
        "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics "
        "custom_histogram_buckets per_request_spec_decode_metrics",
        _MEASURED,
    ),
    **_idle(
        "enable_layerwise_nvtx_tracing enable_logging_iteration_details profiler_config jit_monitor_mode "
        "jit_monitor_verbose fail_on_environ_validation",
        "python -m benchmarks.b06 measures steps and kernels",
    ),
}
_DEVICE: dict[str, Name] = {
    **_idle(
        "attention_backend attention_config kernel_config linear_backend moe_backend sparse_indexer_topk_backend "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend ir_op_priority enable_flashinfer_autotune "
        "disable_cascade_attn enable_flash_late_interaction use_fp64_gumbel performance_mode",
        _KERNELS,
    ),
    **_idle(
        "compilation_config optimization_level cudagraph_capture_sizes max_cudagraph_capture_size "
        "max_seq_len_to_capture",
        _GRAPHS,
    ),
}
GROUPS: Mapping[str, Mapping[str, Name]] = {
    "Model": _MODEL,
    "Scheduler": _SCHEDULER,
    "Memory": _MEMORY,
    "Pictures and videos": _PICTURES,
    "Cluster": _CLUSTER,
    "Server": _SERVER,
    "Measuring": _MEASURING,
    "Device": _DEVICE,
}
NAMES: Mapping[str, Name] = {key: name for group in GROUPS.values() for key, name in group.items()}
THE_SAME = (
    "revision",
    "config",
    "host",
    "port",
    "root_path",
    "chat_template",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "log_level",
    "async_scheduling",
)
"""Options that are spelled alike and mean the same, so that there is nothing to translate."""


def of_vllm(words: Sequence[str]) -> tuple[list[str], Options]:
    """The words of a command line without the options of `vllm serve`, and these with their values. Raises
    `ConfigError`."""
    return gathered(words, NAMES, SPELLING)


def nearest_of_vllm(key: str, ours: Iterable[str]) -> str | None:
    """The option of `vllm serve` that a misspelt one resembles, or None if one of `ours` or nothing is nearer."""
    near = difflib.get_close_matches(key, [*ours, *NAMES], 1, 0.8)
    return near[0] if near and near[0] in NAMES else None

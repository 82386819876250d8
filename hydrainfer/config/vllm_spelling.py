"""How `vllm serve` writes its options: those without a value, those with several, and the short forms."""

from __future__ import annotations

from hydrainfer.config.foreign import Spelling


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_BARE = _names(
    "aggregate_engine_logging allow_credentials allow_deprecated_quantization cohere_is_reasoning_model "
    "cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
    "dcp_q_replicate disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs "
    "disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats "
    "disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log "
    "enable_auto_tool_choice enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator "
    "enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel "
    "enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune enable_force_include_usage "
    "enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests "
    "enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding "
    "enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds "
    "enable_moe_shared_loras enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics "
    "enable_prefix_caching enable_prompt_embeds enable_prompt_tokens_details enable_reasoning "
    "enable_request_id_headers enable_return_routed_experts enable_scale_out enable_server_load_tracking "
    "enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint "
    "enable_tower_connector_lora enable_trace_replay enforce_eager exclude_tools_when_tool_choice_none "
    "fail_on_environ_validation fully_sharded_loras grpc headless interleave_mm_strings jit_monitor_verbose "
    "kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack "
    "long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only multi_step_stream_outputs "
    "numa_bind ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl "
    "skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay "
    "tokens_only trust_remote_code trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel "
    "use_replayssm use_tqdm_on_load use_v2_block_manager"
)
_SEVERAL = _names(
    "allowed_media_domains api_key collect_detailed_traces cpu_offload_params cudagraph_capture_sizes hf_token "
    "ignore_patterns kv_cache_dtype_skip_layers logits_processors lora_modules lora_target_modules numa_bind_cpus "
    "numa_bind_nodes offload_params served_model_name sleep_preserve_parameter_names"
)
_SHORT = {
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "api_server_count",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-O": "optimization_level",
    "-ac": "attention_config",
    "-dc": "diffusion_config",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpl": "data_parallel_size_local",
    "-dpr": "data_parallel_start_rank",
}
SPELLING = Spelling(_BARE, _SEVERAL, _SHORT)

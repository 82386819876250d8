"""The resolution of options that are `auto` on this machine: device, dtype, cache sizes, context length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from hydrainfer.assemble.workspace import Rows, workspace_bytes
from hydrainfer.cache import (
    TOKENS_PER_RUNNING,
    CacheSizes,
    CacheSpec,
    Wishes,
    host_sizes,
    padded,
    share_memory,
    size_caches,
    too_small,
)
from hydrainfer.checkpoint import ModelConfig, model_folder
from hydrainfer.config import ServeConfig, inline_slo
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError, Role, Stage
from hydrainfer.engine import Overlap
from hydrainfer.families import read_config
from hydrainfer.machine import free_memory_bytes, memory_bytes
from hydrainfer.models import DTYPES, cache_specs
from hydrainfer.ops import computes_sooner
from hydrainfer.processor import ModelDescription
from hydrainfer.scheduler import ENOUGH_S, Budgets
from hydrainfer.storage import check_between

GIB = 1 << 30
_SHORT_CHAT, _USUAL_PICTURE = 64, 1024  # tokens


def torch_device(config: ServeConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device; use --device cpu", param="device")
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if cuda else torch.device("cpu")  # CUDA_VISIBLE_DEVICES selects device 0


def check_between_processes(transport: str, gpu_shares: Sequence[float] = ()) -> None:
    """Check that instances in separate processes, each with such a share of a GPU, can use the transport. Raises
    `ConfigError`."""
    check_between(transport)
    if transport == "nccl" and any(0.0 < share < 1.0 for share in gpu_shares):
        raise ConfigError(
            "transport nccl cannot copy between instances that share a GPU: NCCL refuses two ranks on one device; use "
            "cuda-ipc or auto",
            param="transport",
        )


def overlap_of(config: ServeConfig, device: torch.device) -> Overlap:
    """The way the two lanes overlap. On a CPU, side by side, each would get half of the cores. So they take turns,
    which gives the highest throughput, or, with an SLO, pictures yield to decodes, which bounds the gaps
    (benchmarks/b05). Raises `ConfigError`."""
    if config.overlap == "slice" and device.type == "cuda" and config.device != "emulated":
        raise ConfigError("--overlap slice is for lanes that share a CPU; use free", param="overlap")
    if config.overlap == "auto":
        if device.type == "cuda" or config.device == "emulated":
            return "free"
        return "slice" if config.slo else "off"
    return config.overlap


def ahead_of(config: ServeConfig, device: torch.device) -> bool:
    """Whether the next step is launched while one is computed. By default only on CUDA: on a CPU, the host's work takes
    cores from the step that is to hide it. It must be off if drafts are used (see `Engine`). Raises `ConfigError`."""
    if config.device == "emulated":
        if config.async_scheduling:
            raise ConfigError("an emulated device takes no time between steps to be hidden", param="async_scheduling")
        return False
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def budgets_of(config: ServeConfig, overlap: Overlap) -> Budgets:
    """The budgets of an instance's scheduler. Raises `ConfigError`."""
    if config.token_budget == "auto" or config.image_budget == "auto":
        raise ConfigError("budgets are settled by `hydrainfer serve`; here, give numbers", param="token_budget")
    budgets = Budgets(
        tokens=config.token_budget,
        images=config.image_budget,
        image_tokens=config.image_token_budget,
        running=config.max_running,
        step_s=config.step_s,
        enough_s=ENOUGH_S if overlap == "off" and config.order == "rank" else float("inf"),
    )
    if overlap != "slice":
        return budgets
    slo = inline_slo(config.slo)
    return budgets.within(None, None) if slo is None else budgets.within(slo.tpot_s, slo.ttft_s)


def dtype_of(config: ServeConfig, device: torch.device, checkpoint: str) -> str:
    """The dtype to compute in. CPU: the checkpoint's if this processor is faster in it than in float32, which is
    measured once, else float32. CUDA: the checkpoint's, or bfloat16 if that is float32."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        if config.device == "emulated" or checkpoint not in DTYPES or checkpoint == "float32":
            return "float32"
        sooner = computes_sooner(DTYPES[checkpoint], use_native=config.native_kernels, threads=config.threads)
        return checkpoint if sooner else "float32"
    return "bfloat16" if checkpoint == "float32" else checkpoint


def quantization_of(config: ServeConfig, device: torch.device) -> Quantization:
    """The quantization of the weights. Raises `ConfigError` if the device does not support it."""
    if config.quantization != "none" and (config.device == "emulated" or device.type != "cpu"):
        where = (
            "an emulated device has no weights" if config.device == "emulated" else "there are no CUDA kernels for it"
        )
        raise ConfigError(f"--quantization {config.quantization} is for --device cpu; {where}", param="quantization")
    return config.quantization


def with_dtype(config: ServeConfig) -> ServeConfig:
    """`config` with the dtype for this machine. Raises `CheckpointError`."""
    dtype = dtype_of(config, torch_device(config), read_config(model_folder(config)).dtype)
    return msgspec.structs.replace(config, dtype=dtype)


def cache_sizes(
    config: ServeConfig,
    model: ModelConfig,
    role: Role,
    dtype: str,
    device: torch.device,
    n_context: int,
    share: float,
    weight_bytes: int = 0,
) -> CacheSizes:
    """The number of blocks of each cache of an instance, from the options or from its `share` of the free memory.
    `weight_bytes`: the bytes of the loaded weights. Raises `ConfigError` if there is too little memory."""
    specs = cache_specs(model, role, dtype, config.block_tokens)
    n_tokens = max(config.max_running * TOKENS_PER_RUNNING, n_context) if device.type == "cpu" else None
    wishes = Wishes(model.vision.tokens if model.vision else 0, config.max_images, n_tokens, n_context)
    options = {spec.size_option: getattr(config, spec.size_option) for spec in specs}
    given = {option: int(gib * GIB) for option, gib in options.items() if gib is not None}
    _check_given(given, specs, wishes)
    free = free_bytes(config, device, share, weight_bytes)
    if device.type == "cuda":
        budgets = budgets_of(config, "free")
        embeddings = min(budgets.image_tokens, budgets.images * wishes.picture_tokens)
        rows = Rows(max(budgets.tokens, budgets.running), budgets.running, n_context, embeddings)
        free -= workspace_bytes(model, role, dtype, rows, config.block_tokens)
    sizes = size_caches(specs, wishes, free, given)
    if too_small(sizes, wishes):
        wants = [f"{spec.size_noun} {spec.least(wishes) * spec.block_bytes}" for spec in specs]
        raise ConfigError(
            f"no memory for the caches of an instance {role}: {' and '.join(wants)} bytes; lower --max-running "
            "or give --kv-cache-gib and --image-cache-gib"
        )
    if sum(spec.block_bytes * n for spec, n in sizes.items()) > _total_bytes(device):
        raise no_memory(sizes)
    return share_memory(sizes, wishes) if config.elastic_memory else CacheSizes(sizes)


def _check_given(given: Mapping[str, int], specs: Sequence[CacheSpec], wishes: Wishes) -> None:
    """Check that caches fixed by an option can hold at least a short chat, with a usual picture if the model takes
    pictures. Raises `ConfigError`."""
    n_tokens = _SHORT_CHAT + min(wishes.picture_tokens, _USUAL_PICTURE)
    n_tokens = min(n_tokens, wishes.n_longest or n_tokens)
    for option, n_bytes in given.items():
        fixed = [spec for spec in specs if spec.size_option == option]
        least = sum(max(spec.least(wishes), len(spec.span(0, n_tokens))) * spec.block_bytes for spec in fixed)
        if n_bytes < least:
            exact = 10 ** (2 - math.floor(math.log10(least / GIB)))
            raise ConfigError(
                f"--{option.replace('_', '-')} {n_bytes / GIB:.2g} is too little for this model; it must be at least "
                f"{math.ceil(least / GIB * exact) / exact:g}",
                param=option,
            )


def host_tier_sizes(
    config: ServeConfig, model: ModelConfig, role: Role, dtype: str, n_context: int
) -> dict[CacheSpec, int]:
    """The number of blocks of each cache in host memory of an instance; empty if it only encodes or the option is 0.
    Raises `ConfigError` if such caches are impossible."""
    if not config.host_cache_gib or not (role.runs(Stage.PREFILL) or role.runs(Stage.DECODE)):
        return {}
    if config.transport == "nccl":
        raise ConfigError("transport nccl copies to GPUs only; use auto with --host-cache-gib", param="host_cache_gib")
    n_bytes = int(config.host_cache_gib * GIB)
    if n_bytes > memory_bytes():
        raise ConfigError(
            f"--host-cache-gib {config.host_cache_gib:g} is more than this machine has", param="host_cache_gib"
        )
    sizes = host_sizes(_specs_in_blocks(config, model, role, dtype), Wishes(n_longest=n_context), n_bytes)
    if not sizes:
        raise ConfigError(
            f"--host-cache-gib {config.host_cache_gib:g} is less than one block of each cache", param="host_cache_gib"
        )
    return sizes


def block_bytes(config: ServeConfig, model: ModelConfig, role: Role) -> dict[str, int]:
    """The bytes of a block of each cache, by name. Instances copy whole blocks, so the sizes must be equal.
    `config.dtype` must be resolved."""
    return {spec.name: spec.block_bytes for spec in _specs_in_blocks(config, model, role, config.dtype)}


def _specs_in_blocks(config: ServeConfig, model: ModelConfig, role: Role, dtype: str) -> list[CacheSpec]:
    specs = cache_specs(model, role, dtype, config.block_tokens)
    return padded(specs) if config.elastic_memory else list(specs)


def no_memory(sizes: dict[CacheSpec, int]) -> ConfigError:
    gib = sum(spec.block_bytes * n for spec, n in sizes.items()) / GIB
    return ConfigError(
        f"no memory for caches of {gib:.3g} GiB; lower --kv-cache-gib, --image-cache-gib or --max-running"
    )


def fit_context(config: ServeConfig, description: ModelDescription, kv_tokens: int) -> ModelDescription:
    """The description with a context no longer than the tokens that fit the KV cache. Raises `ConfigError` if
    `max_model_len` asks for more."""
    if kv_tokens >= description.n_context:
        return description
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the KV cache holds {kv_tokens} tokens; "
            "raise --kv-cache-gib or lower --max-model-len",
            param="max_model_len",
        )
    return dataclasses.replace(description, n_context=kv_tokens)


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return memory_bytes()


def free_bytes(config: ServeConfig, device: torch.device, share: float, weight_bytes: int) -> float:
    """The bytes left for caches and for what else an instance needs (`workspace_bytes`). On CUDA, `share` is a share of
    the device, including this instance's weights, whatever others in the process hold; memory that torch has reserved
    and does not use counts as free. On a CPU it is a share of half of the free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        ours = config.gpu_memory_fraction * share * total - weight_bytes
        return min(free - (1 - config.gpu_memory_fraction) * total, ours)
    return free_memory_bytes() / 2 * share  # half: other processes need memory, too

"""A model loaded on its device for a role, and the runners that execute its batches on lanes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import torch

from hydrainfer.assemble.sizes import quantization_of, torch_device
from hydrainfer.cache import for_stage
from hydrainfer.checkpoint import ModelConfig, model_folder
from hydrainfer.config import ServeConfig
from hydrainfer.config.schema import Quantization
from hydrainfer.core import Lane, PixelSource, Role, Stage
from hydrainfer.engine import WaitFor
from hydrainfer.grammar import Follower
from hydrainfer.models import DTYPES, Model, attentions_of, load_model
from hydrainfer.ops import OpSet, alone, select_ops
from hydrainfer.runtime import (
    Guesser,
    LaneThread,
    LanguageRunner,
    ThreadCount,
    VisionRunner,
    capture_for,
    capture_passes_for,
    no_graphs,
    no_pass_graphs,
)
from hydrainfer.storage import BlockStore

Progress = Callable[[int, int], None]


def load_for(
    config: ServeConfig,
    described: ModelConfig,
    role: Role,
    dtype: str,
    n_threads: int,
    on_progress: Progress | None = None,
    pause: Callable[[], None] | None = None,
) -> Model:
    """Load what the role needs of the model, in `dtype`, with the fastest operators for the device. `pause`: called
    between the vision tower's matrix products. Raises `ConfigError` or `CheckpointError`."""
    quantization = quantization_of(config, torch_device(config))
    ops = ops_for(config, described, role, dtype, n_threads, quantization)
    return load_model(model_folder(config), role, torch_device(config), dtype, on_progress, ops, described, pause)


def ops_for(
    config: ServeConfig, described: ModelConfig, role: Role, dtype: str, n_threads: int, quantization: Quantization
) -> OpSet:
    """The fastest operators on the device for what the role needs of a model."""
    kind = DTYPES[dtype]
    return select_ops(
        torch_device(config),
        kind,
        described.text.head_dim,
        use_native=config.native_kernels,
        threads=n_threads,
        quantization=quantization,
        attentions=attentions_of(described, role, kind, config.block_tokens),
    )


def lanes_for(
    model: Model,
    wake: Callable[[], None],
    n_threads: int,
    busy: Callable[[Lane], bool],
    *,
    shared: bool = False,
    fixed: bool = False,
    priority: int = -1,
) -> dict[Lane, LaneThread]:
    """The threads of the lanes that the model needs, or the one that they share. A batch is computed by at most
    `n_threads` CPU threads while the other lane is not `busy`, and by half of them while it is; `fixed`: always by as
    many. `priority`: the language lane's, see `LaneThread`."""

    def lane(name: str, other: Lane, priority: int = 0) -> LaneThread:
        n_beside = max(1, n_threads // 2)
        threads = ThreadCount(lambda: n_beside if busy(other) else n_threads, fixed=fixed)
        return LaneThread(name, model.device, wake, threads, priority)

    if shared:
        return dict.fromkeys(Lane, lane("lanes", Lane.VISION))
    found = {}
    if model.vision is not None:
        found[Lane.VISION] = lane("vision", Lane.LANGUAGE)
    if model.language is not None:
        found[Lane.LANGUAGE] = lane("language", Lane.VISION, priority)
    return found


def runners_for(
    config: ServeConfig,
    model: Model,
    lanes: Mapping[Lane, LaneThread],
    stores: Mapping[str, BlockStore],
    pixels: PixelSource,
    follower: Follower | None = None,
    guesser: Guesser | None = None,
    loading: Mapping[str, WaitFor] | None = None,
) -> dict[Lane, VisionRunner | LanguageRunner]:
    """The runner of each lane, with its CUDA graphs captured. `stores`: the caches by name; `loading`: see
    `LanguageRunner`."""
    runners: dict[Lane, VisionRunner | LanguageRunner] = {}
    if model.vision is not None:
        embeds = for_stage((store.spec for store in stores.values()), Stage.ENCODE)
        assert embeds is not None, "a vision tower without a cache for what it makes"
        capture = capture_passes_for(model) if config.cuda_graphs else None
        vision = VisionRunner(model, stores[embeds.name], pixels, lanes[Lane.VISION], capture)
        vision.capture()
        runners[Lane.VISION] = vision
    if model.language is not None:
        capture = capture_for(model) if config.cuda_graphs else None
        language = LanguageRunner(model, stores.values(), lanes[Lane.LANGUAGE], follower, capture, guesser, loading)
        language.capture()
        runners[Lane.LANGUAGE] = language
    return runners


def free_unused() -> None:
    """Free what nothing uses any more: objects that refer to each other, and on CUDA the memory that torch keeps for
    later allocations, which other processes, and `mem_get_info`, take to be in use."""
    gc.collect()
    if torch.cuda.is_initialized():
        with alone():  # it would break a capture under way
            torch.cuda.empty_cache()


def attention_and_graphs(
    config: ServeConfig, model: Model, runners: Mapping[Lane, VisionRunner | LanguageRunner]
) -> tuple[str, str]:
    """What attends over each cache, and what is replayed from CUDA graphs or why not; a line each."""
    attention = dict(model.ops.chosen)["attention"]
    caches = attentions_of(model.config, model.role, model.dtype, config.block_tokens)
    found = []
    for lane, runner in runners.items():
        what, why = ("pictures", no_pass_graphs) if lane is Lane.VISION else ("decodes", no_graphs)
        reason = (why(model) or "capturing failed") if config.cuda_graphs else "cuda_graphs is off"
        found.append(f"{what}: {'replayed' if runner.has_graphs else f'not replayed, {reason}'}")
    return "\n".join(f"{each.cache}: {attention}" for each in caches), "\n".join(found)

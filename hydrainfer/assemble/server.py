"""Assembly of a running server, without its HTTP part, from a configuration: processor, sessions, one engine or a
cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.assemble.engine import Surroundings
from hydrainfer.assemble.instances import Started, start_cluster, start_one
from hydrainfer.assemble.media import (
    backend_name,
    check_backends,
    fetch_limits,
    media_limits,
    media_workers,
    pixel_backend,
    resampler,
    video_reading,
)
from hydrainfer.assemble.model import Progress
from hydrainfer.assemble.sizes import dtype_of, fit_context, quantization_of, torch_device
from hydrainfer.cache import CacheSet
from hydrainfer.checkpoint import ModelConfig, is_hub_name, model_folder, name_of
from hydrainfer.config import (
    InstanceSpec,
    ServeConfig,
    choose_launcher,
    cost_model_of,
    inline_slo,
    read_layout,
)
from hydrainfer.core import ConfigError, Stage
from hydrainfer.engine import EngineHandle
from hydrainfer.families import ParsedConfig, family_of, parse_config
from hydrainfer.grammar import Grammars, load_grammars
from hydrainfer.metrics import CacheFacts, PrometheusRecorder
from hydrainfer.models import fingerprint
from hydrainfer.processor import Fetcher, ModelDescription, PixelStore, Processor, load_description
from hydrainfer.scheduler import Policy
from hydrainfer.server import Intake, OverloadControl, Sessions, Traces, open_traces
from hydrainfer.storage import check_transport
from hydrainfer.stores import check_stores

_QUEUE_S = 10.0  # of waiting work, if no SLO limits it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The running parts of a server, as the server and the offline API need them. `engine`: the single instance, or the
    hub of several. `facts`: the resolved values of options that were `auto`. `traces`: None if they are not wanted."""

    config: ServeConfig
    names: tuple[str, ...]
    intake: Intake
    sessions: Sessions
    engine: EngineHandle
    recorder: PrometheusRecorder
    facts: dict[str, Any]
    pools: Callable[[], dict[str, CacheSet]]
    traces: Traces | None = None

    @property
    def name(self) -> str:
        """The first of the served names."""
        return self.names[0]

    @property
    def caches(self) -> CacheSet:
        """The caches of the single instance."""
        (caches,) = self.pools().values()
        return caches

    def warm(self) -> None:
        """Start the processes for pictures and grammars now, so that the first request does not wait for them."""
        processor = self.intake.processor
        if processor.media.workers and processor.model.images is not None:
            processor.media.workers.warm()
        if processor.grammars is not None:
            processor.grammars.warm()

    def close(self) -> None:
        """End running requests and stop every thread and process. Safe to repeat."""
        self.intake.close()
        self.engine.close()
        self.sessions.settle_all()
        if self.traces is not None:
            self.traces.close()


def start_instance(config: ServeConfig, on_progress: Progress | None = None) -> ServerParts:
    """Load the model and start the engines. Raises `ConfigError` or `CheckpointError` with a message of one line."""
    specs = read_layout(config.layout)
    check_backends(config)
    check_stores(config, specs)
    fetcher = Fetcher(fetch_limits(config))
    parsed = parse_config(model_folder(config))
    model = parsed.model.by(pixel_backend(config))
    parsed = parsed._replace(model=model)
    _check_layout(config.layout, specs, model)
    description = _description(config, parsed)
    config = _settled(config, model)
    pixels = PixelStore(int(config.pixel_memory_mib * 2**20), int(config.media_memory_mib * 2**20))
    admission = _admission(config, model, specs)
    sessions = Sessions(description.vocabulary, pixels, time.monotonic, admission)
    names = _names(config)
    traces = open_traces(config.otlp_endpoint, names[0]) if config.otlp_endpoint else None
    if traces is not None:
        sessions.on_ended = traces.ended
    emulated = cost_model_of(config) is not None
    grammars = None if emulated else load_grammars(model_folder(config), model.text.vocab, description.eos_ids)
    started: Started
    recorder = PrometheusRecorder(
        names[0],
        lambda: started.engine.instances(),
        admission.waiting,
        CacheFacts(config.prefix_cache, config.block_tokens),
        config.metrics_prefix,
        engine=specs[0].name if len(specs) == 1 else "",
    )
    told, n_context = (sessions.sink, recorder.record), description.n_context
    if choose_launcher(config, specs) == "inproc" and len(specs) == 1:
        around = partial(Surroundings, *told, pixels=pixels.get, grammars=grammars)
        started = start_one(config, model, specs[0], n_context, around, on_progress)
    else:
        started = start_cluster(config, model, specs, n_context, description.eos_ids, *told, pixels.get)
    engine, facts, kv_tokens, pools = started
    try:
        description = fit_context(config, description, kv_tokens or n_context)
        intake = _intake(config, model, description, pixels, sessions, fetcher, grammars)
    except BaseException:
        engine.close()
        raise
    sessions.attach(engine, recorder.timings, recorder.stopped, recorder.doing)
    workers = intake.processor.media.workers
    facts |= {
        "image_backend": backend_name(config, intake.processor.limits),
        "media_workers": workers.n if workers else 0,
    }
    facts = {"served_model_name": ", ".join(names), "max_model_len": description.n_context, **facts}
    return ServerParts(config, names, intake, sessions, engine, recorder, facts, pools, traces)


def _description(config: ServeConfig, parsed: ParsedConfig) -> ModelDescription:
    return load_description(
        model_folder(config),
        max_context=config.max_model_len,
        chat_template=_chat_template(config),
        template_name=config.chat_template,
        tool_calls=config.tool_call_parser,
        reasoning=config.reasoning_parser,
        parsed=parsed,
    )


def _settled(config: ServeConfig, model: ModelConfig) -> ServeConfig:
    """The options with the dtype that all instances compute in. Raises `ConfigError` if the device does not support an
    option."""
    device = torch_device(config)
    check_transport(config.transport, device)
    quantization_of(config, device)
    dtype = dtype_of(config, device, model.dtype)
    if dtype == "float16" and family_of(model).overflows:
        _log.warning("numbers of this model are larger than float16 holds, and answers may be empty: --dtype bfloat16")
    if model.fp8 is not None and config.device != "emulated":
        kind = dtype if config.quantization == "none" else config.quantization
        _log.info("its weights in FP8 become %s while they are read; activations are not quantised", kind)
    return msgspec.structs.replace(config, dtype=dtype)


def _admission(config: ServeConfig, model: ModelConfig, specs: Sequence[InstanceSpec]) -> OverloadControl:
    slo = inline_slo(config.slo)
    return OverloadControl(
        time.monotonic,
        longest_s=config.max_queue_s or min((slo and slo.ttft_s) or _QUEUE_S, config.request_timeout_s),
        max_requests=config.max_waiting,
        pictures=model.vision is not None,
        policy=Policy(order=config.order),
        n_instances=sum(s.role.runs(Stage.ENCODE) or s.role.runs(Stage.PREFILL) for s in specs),
    )


def _chat_template(config: ServeConfig) -> str | None:
    """The text of the chat template that the options name, if any. Raises `ConfigError`."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text("utf-8")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise ConfigError(f"chat_template: cannot read {config.chat_template}: {why}", param="chat_template") from None


def _names(config: ServeConfig) -> tuple[str, ...]:
    """The names of the model for clients. Raises `ConfigError`."""
    own = config.model if is_hub_name(config.model) else name_of(model_folder(config))
    given = config.served_model_name or own
    names = tuple(name.strip() for name in given.split(",")) if config.served_model_name else (given,)
    if not all(names):
        raise ConfigError("served_model_name: a name is empty; write them like mine,gpt-4o", param="served_model_name")
    return tuple(dict.fromkeys(names))


def _check_layout(layout: str, specs: Sequence[InstanceSpec], model: ModelConfig) -> None:
    """Check that some instance encodes if the model takes pictures, and that none only encodes if it does not. Raises
    `ConfigError`."""
    encoders = [s for s in specs if s.role.runs(Stage.ENCODE)]
    idle = [s.name for s in encoders if len(s.role.stages) == 1]
    if model.vision is not None and not encoders:
        raise ConfigError(
            f"layout {layout!r} has no instance that runs encode, which {model.architecture} needs", param="layout"
        )
    if model.vision is None and idle:
        raise ConfigError(
            f"{model.architecture} takes text only, so {idle[0]} of layout {layout!r} would have nothing to do; "
            "use one without E, such as 1PD or 1P1D",
            param="layout",
        )


def _intake(
    config: ServeConfig,
    model: ModelConfig,
    description: ModelDescription,
    pixels: PixelStore,
    sessions: Sessions,
    fetcher: Fetcher,
    grammars: Grammars | None,
) -> Intake:
    limits = media_limits(config, resampler(config))
    # samples are enough: a server has one checkpoint, and a store puts these keys below a root of all bytes
    weights = fingerprint(model_folder(config), model, weights=config.device != "emulated")
    workers = media_workers(config, limits)
    processor = Processor(
        description,
        pixels,
        weights=weights,
        dtype=config.dtype if config.quantization == "none" else f"{config.dtype} {config.quantization}",
        limits=limits,
        videos=video_reading(config, limits.resampler),
        workers=workers,
        grammars=grammars,
        block_tokens=config.block_tokens if config.prefix_cache else 0,
    )
    return Intake(
        processor,
        sessions,
        fetcher=fetcher,
        n_threads=config.preprocess_threads,
        n_media_threads=2 * workers.n if workers else config.preprocess_threads,  # waiting for a worker takes no CPU
        timeout_s=config.request_timeout_s,
    )

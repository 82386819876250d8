"""From a configuration to a running server without its HTTP: processor, sessions, and one engine or a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrainfer.assemble.engine import Progress, Surroundings, build_engine
from hydrainfer.assemble.instances import Cluster, start_cluster
from hydrainfer.assemble.sizes import dtype_of, fit_context, torch_device
from hydrainfer.cache import CacheSet
from hydrainfer.config import ServeConfig
from hydrainfer.core import Layout
from hydrainfer.engine import EngineHandle, EngineThread
from hydrainfer.metrics import PrometheusRecorder
from hydrainfer.models import read_config, vision_fingerprint
from hydrainfer.processor import MediaLimits, ModelDescription, PixelStore, Processor, load_description
from hydrainfer.server import Intake, Sessions


@dataclass(frozen=True, slots=True)
class Instance:
    """What runs, and what the server and the offline API need beside it. `engine`: the only instance, or the hub of
    several. `facts`: the resolved values of options that were `auto`."""

    config: ServeConfig
    name: str
    intake: Intake
    sessions: Sessions
    engine: EngineHandle
    recorder: PrometheusRecorder
    facts: dict[str, Any]
    pools: Callable[[], dict[str, CacheSet]]

    @property
    def caches(self) -> CacheSet:
        """Of the only instance."""
        (caches,) = self.pools().values()
        return caches

    def close(self) -> None:
        """End what runs, stop every thread and process. Safe to repeat."""
        self.intake.close()
        self.engine.close()
        self.sessions.settle_all()


def start_instance(config: ServeConfig, on_progress: Progress | None = None) -> Instance:
    """Load the model and start the engines. Raises `ConfigError` or `CheckpointError`, one line each."""
    layout = Layout.parse(config.layout)
    path = Path(config.model).expanduser()
    description = load_description(path, max_context=config.max_model_len)
    device = torch_device(config)
    dtype = dtype_of(config, device, read_config(path).dtype)
    pixels = PixelStore(int(config.pixel_memory_mib * 2**20))
    sessions = Sessions(description.vocabulary, pixels, time.monotonic, max_requests=config.max_waiting)
    name = config.served_model_name or path.resolve().name
    engine: EngineHandle
    recorder: PrometheusRecorder
    pools: Callable[[], dict[str, CacheSet]]
    if len(layout.instances) == 1:
        thread = EngineThread(time.monotonic, f"engine-{layout.instances[0]}0")
        recorder = PrometheusRecorder(name, thread.stats)
        n_threads = config.threads or len(os.sched_getaffinity(0))
        around = Surroundings(sessions.sink, recorder.record, thread.wake, pixels.get)
        built = build_engine(
            config,
            layout.instances[0],
            around,
            n_context=description.n_context,
            n_threads=n_threads,
            on_progress=on_progress,
        )
        description = fit_context(config, description, built.kv_tokens or description.n_context)
        thread.start(built.engine)
        engine, facts, caches = thread, built.facts, built.caches

        def pools() -> dict[str, CacheSet]:
            return {f"{layout.instances[0]}0": caches}

    else:
        recorder = PrometheusRecorder(name, lambda: cluster.hub.stats())
        cluster: Cluster = start_cluster(
            config, layout, description.n_context, sessions.sink, recorder.record, pixels.get
        )
        try:
            description = fit_context(config, description, cluster.kv_tokens)
        except BaseException:
            cluster.hub.close()
            raise
        engine, facts, pools = cluster.hub, cluster.facts, cluster.pools
    sessions.attach(engine)
    intake = _intake(config, description, pixels, sessions, dtype)
    facts = {"served_model_name": name, "max_model_len": description.n_context, **facts}
    return Instance(config, name, intake, sessions, engine, recorder, facts, pools)


def _intake(
    config: ServeConfig, description: ModelDescription, pixels: PixelStore, sessions: Sessions, dtype: str
) -> Intake:
    limits = MediaLimits(max_images=config.max_images, max_pixels=config.max_image_pixels)
    weights = vision_fingerprint(Path(config.model).expanduser())
    processor = Processor(description, pixels, weights=weights, dtype=dtype, limits=limits)
    return Intake(processor, sessions, n_threads=config.preprocess_threads, timeout_s=config.request_timeout_s)

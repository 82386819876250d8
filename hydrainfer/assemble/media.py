"""The processor's limits and workers, from the options for pictures and their sources."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from hydrainfer.checkpoint import DEFAULT_BACKEND, PixelBackend
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError
from hydrainfer.machine import n_cores
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import FetchLimits, MediaLimits, MediaWorkers, VideoLimits, VideoReading, agrees

MIB = 2**20
_MOST_WORKERS = 4
_SOURCES = {"pillow": "resample", "torchvision": "resample_int16"}
_WITHOUT_KERNEL = {"pillow": "Pillow", "torchvision": "torch"}
_EXTRAS = (("image_backend", "dali", "nvidia.dali", "dali"), ("video_backend", "decord", "decord", "video"))
_log = logging.getLogger(__name__)


def check_backends(config: ServeConfig) -> None:
    """Check that the chosen decoders are installed. Raises `ConfigError`."""
    for option, backend, module, extra in _EXTRAS:
        if getattr(config, option) == backend and not _installed(module):
            raise ConfigError(f"{backend} is not installed: pip install 'hydrainfer[{extra}]'", param=option)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def media_limits(config: ServeConfig, resampler: str = "") -> MediaLimits:
    """The limits on pictures set by the options. `resampler`: the result of `resampler()`."""
    return MediaLimits(
        max_images=config.max_images,
        max_videos=config.max_videos,
        max_image_bytes=int(config.max_image_mib * MIB),
        max_pixels=config.max_image_pixels,
        fast_jpeg=config.fast_jpeg,
        resampler=resampler,
        dali=config.image_backend == "dali",
    )


def pixel_backend(config: ServeConfig) -> PixelBackend:
    """The library whose pixels are wanted. DALI's are its own, but it leaves some pictures to the default."""
    if config.image_backend == "auto" or config.image_backend == "dali":
        return DEFAULT_BACKEND
    return config.image_backend


def resampler(config: ServeConfig) -> str:
    """The path of the compiled resizing library; empty if it is not wanted, cannot be compiled, or differs from the
    installed Pillow or, for torchvision's pixels, from torch."""
    backend = pixel_backend(config)
    if not config.native_kernels:
        return ""
    library = build_resampler(_SOURCES[backend])
    if library and not agrees(library, backend):
        _log.warning("our kernel resizes differently here; using %s (slower)", _WITHOUT_KERNEL[backend])
        return ""
    if backend == "torchvision" and not library:
        _log.warning("no C++ compiler works here, so torch resizes pictures: each media worker loads it")
    return library


def resizes_by_torch(config: ServeConfig, library: str) -> bool:
    """Whether torch itself resizes pictures. `library`: the result of `resampler()`."""
    return pixel_backend(config) == "torchvision" and not library


def backend_name(config: ServeConfig, limits: MediaLimits) -> str:
    """The names, for people, of the libraries that decode and resize pictures."""
    backend = pixel_backend(config)
    decoding = "dali, else pillow" if limits.dali else "pillow"
    pixels = ", torchvision's pixels" if backend == "torchvision" else ""
    if limits.resampler:
        return f"{decoding}{pixels}, our resizing"
    return f"{decoding}{pixels}, torch's resizing" if pixels else decoding


def video_reading(config: ServeConfig, resampler: str = "") -> VideoReading:
    limits = VideoLimits(
        max_bytes=int(config.max_video_mib * MIB),
        max_duration_s=config.max_video_s,
        max_frames=config.max_video_frames,
    )
    return VideoReading(limits, config.video_threads, config.video_backend, resampler)


def media_workers(config: ServeConfig, limits: MediaLimits) -> MediaWorkers | None:
    """The processes that decode pictures; None if the preparation threads do."""
    n = min(n_cores(), _MOST_WORKERS) if config.media_workers is None else config.media_workers
    if not n:
        return None
    by_torch = resizes_by_torch(config, limits.resampler)
    return MediaWorkers(n, limits, job_limit_s=config.media_timeout_s, by_torch=by_torch, log_form=config.log_format)


def fetch_limits(config: ServeConfig) -> FetchLimits:
    """The limits on downloads set by the options. Raises `ConfigError`."""
    roots = tuple(Path(name).expanduser() for name in _listed(config.media_roots))
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"media_roots: {root} is no directory", param="media_roots")
    domains = tuple(name.lower() for name in _listed(config.media_domains))
    for name in domains:
        if any(c in name for c in "/:@ ") or "*" in name.removeprefix("*."):
            raise ConfigError(f"media_domains: {name!r} is no host name; e.g. example.com", param="media_domains")
    return FetchLimits(
        hosts=config.media_hosts,
        domains=domains,
        roots=roots,
        max_image_bytes=int(config.max_image_mib * MIB),
        image_s=config.image_fetch_s,
        max_video_bytes=int(config.max_video_mib * MIB),
        video_s=config.video_fetch_s,
        n_parallel=config.fetches,
        held_bytes=int(config.fetch_memory_mib * MIB),
    )


def _listed(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]

"""JPEGs decoded and resized by DALI (the `dali` extra): on a GPU if there is one, else on the CPU, which is no faster
than Pillow and serves only for tests. The pixels differ from the reference by 0.1 of 255 on average."""

from __future__ import annotations

import io
import threading
from functools import cache
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.backend import GetCUDADeviceCount
from PIL import Image

_FILTERS = {int(Image.Resampling.BILINEAR): types.INTERP_LINEAR, int(Image.Resampling.BICUBIC): types.INTERP_CUBIC}


@cache
def decoder() -> DaliDecoder:
    """The decoder of this process. It holds a CUDA context and buffers."""
    return DaliDecoder(0 if GetCUDADeviceCount() else None)


def warm() -> None:
    """Create the CUDA context and the pipeline that most models use. Both take time and address space."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    decoder().resized(file.getvalue(), 32, 32, Image.Resampling.BICUBIC)


class DaliDecoder:
    """A decoder of one picture at a time. Thread-safe."""

    def __init__(self, device_id: int | None) -> None:
        """`device_id` is a CUDA device; None means the CPU."""
        self.device_id = device_id
        self._pipelines: dict[int, Any] = {}
        self._lock = threading.Lock()

    def resized(self, data: bytes, width: int, height: int, resample: int) -> np.ndarray | None:
        """A JPEG as uint8 [height, width, 3] RGB, resized with antialiasing; None if DALI cannot decode it or lacks the
        filter. The caller checks limits and turns the picture upright."""
        if resample not in _FILTERS:
            return None
        with self._lock:
            pipeline = self._pipelines.pop(resample, None) or self._built(resample)
            try:
                pipeline.feed_input("file", [np.frombuffer(data, np.uint8)])
                pipeline.feed_input("size", [np.array([height, width], np.float32)])
                (made,) = pipeline.run()
                array = np.array((made if self.device_id is None else made.as_cpu()).at(0))
            except RuntimeError:  # the pipeline is not kept, since its next pictures would fail as well
                return None
            self._pipelines[resample] = pipeline
            return array

    def _built(self, resample: int) -> Any:
        @pipeline_def(batch_size=1, num_threads=1, device_id=self.device_id, prefetch_queue_depth=1)
        def graph() -> Any:
            file = fn.external_source(name="file", ndim=1, dtype=types.UINT8)
            size = fn.external_source(name="size", ndim=1, dtype=types.FLOAT)  # height, width
            device = "cpu" if self.device_id is None else "mixed"
            image = fn.decoders.image(file, device=device, output_type=types.RGB, adjust_orientation=False)
            return fn.resize(image, size=size, interp_type=_FILTERS[resample], antialias=True)

        pipeline = graph()
        pipeline.build()
        return pipeline

"""What the studies of a question are made of: a model's shape, devices, an engine, a workload's trace, an SLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import Guessing, Layout
from hydrainfer.machine import n_cores
from hydrainfer.planner.costs import EngineModel, ModelShape
from hydrainfer.planner.nouns import ServerCost, TraceRequest
from hydrainfer.planner.search import Study, candidates_of, study_of
from hydrainfer.planner.simulation import StoreModel
from hydrainfer.profiling.devices import Devices

_MEASURED_ERROR, _EMULATED_ERROR = 0.25, 0.1  # benchmarks/b15_simulator_truth.py


class StudyInputs(NamedTuple):
    """The inputs of a study. `more`: requests for longer runs; `n_instances`: of the largest layout.
    `host_bytes`: host memory of each instance; `store`: one that they share."""

    shape: ModelShape
    devices: Devices
    engine: EngineModel
    trace: tuple[TraceRequest, ...]
    more: tuple[TraceRequest, ...]
    slo: Slo
    target: float
    n_instances: int
    drafts: Guessing | None = None
    host_bytes: int = 0
    store: StoreModel | None = None

    def study(self, slo: Slo | None = None, n_devices: int | None = None) -> Study:
        """The study, with another SLO if given. On a CPU, `n_devices` instances share this machine's memory. Raises
        `ConfigError`."""
        n_devices = n_devices or self.n_instances
        device = self.devices.device
        if self.devices.kind != "gpu":
            device = msgspec.structs.replace(device, memory_bytes=device.memory_bytes / n_devices)
        study = study_of(
            self.shape,
            device,
            self.trace,
            slo or self.slo,
            cost=self.devices.cost,
            kind=self.devices.kind,
            engine=self.engine,
            server=self._server(n_devices),
            target=self.target,
            more=self.more,
            unlike=[other for other, _ in self.devices.unlike[1:]],
            host_bytes=self.host_bytes,
        )
        return msgspec.structs.replace(study, drafts=self.drafts, store=self.store)

    def candidates(self, study: Study, n_devices: int | None = None) -> Sequence[Layout]:
        n_of_kind = {device.name: n for device, n in self.devices.unlike}
        return candidates_of(study, n_of_kind or n_devices or self.n_instances)

    @property
    def model_error(self) -> float | None:
        """See `LayoutPlan`."""
        if self.devices.cost is None:
            return self.engine.error
        if self.devices.kind == "emulated":
            return _EMULATED_ERROR
        return _MEASURED_ERROR

    def _server(self, n_devices: int) -> ServerCost:
        """The engine's server cost. If instances compute on a CPU, the server shares the same cores with them."""
        server = self.engine.server
        if self.devices.kind == "gpu":
            return server
        threads = 0
        if self.devices.kind == "cpu":
            threads = self.devices.threads or max(1, n_cores() // n_devices)
        return msgspec.structs.replace(
            server,
            cores=float(n_cores()),
            each=False,
            threads=threads,
            workers=min(server.workers, n_cores()),
        )

"""Measurement of a model on the present device: stages over a grid, lanes side by side, copies between processes.

Samples are written to a journal line by line, and the next run continues from it. Passes over all cases are repeated
until the time is up, so that in a short time all cases get a few samples, and not a few cases all samples.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from hydrainfer.assemble.sizes import free_bytes, torch_device
from hydrainfer.assemble.workspace import Rows, workspace_bytes
from hydrainfer.checkpoint import model_folder, name_of
from hydrainfer.config import ServeConfig
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError
from hydrainfer.costing.copies import measure_copies
from hydrainfer.costing.grid import GPU_GRID, Case, Grid, blocks_of, bytes_of, cases_of, fitting
from hydrainfer.costing.rig import Rig, load_whole, pictures_of, specs_for
from hydrainfer.judging import at_quantile
from hydrainfer.machine import busy_cores, cpu_name, memory_bytes, n_cores, versions
from hydrainfer.models import Model
from hydrainfer.planner.costs import BatchShape, BatchTime, Copies, CostFile, fit_cost

OnMeasured = Callable[[float, str], None]
_PACKAGES = ("hydrainfer", "torch", "transformers", "numpy", "apache-tvm-ffi", "flashinfer-python")
_LEAST_S = 0.03  # how long a case is repeated in each pass
_BESIDE_S = 0.3  # and how long a pair of lanes
_ENOUGH = 40  # samples of a case that are always enough
_FEW = 10  # the fewest samples that may be enough
_KNOWN = 0.02  # the standard error of a median, as a share of it, below which samples are enough
_COPIES_SHARE = 0.15  # the share of the time for copies
_QUIET_CORES = 0.1  # the share of the cores that other processes may use before the measurement


class _JournalLine(msgspec.Struct, omit_defaults=True):
    """A line of a journal: samples of a case, for both lanes if it has two batches."""

    work: BatchShape
    seconds: list[float]
    beside: BatchShape | None = None
    beside_seconds: list[float] = []


class _JournalHead(msgspec.Struct):
    """The first line of a journal: the model that was measured, and how."""

    model: str
    device: str
    dtype: str
    threads: int
    quantization: Quantization = "none"


def measure_model(
    model: str,
    *,
    minutes: float,
    journal: Path | None = None,
    config: ServeConfig | None = None,
    grid: Grid | None = None,
    transports: Sequence[str] | None = None,
    on_progress: OnMeasured | None = None,
) -> CostFile:
    """Load the model, measure it for about `minutes` (not counting the loading) and fit a cost model. `journal`: a file
    of JSON lines to write to and to continue from. `config`: device, dtype, threads, kernels. `grid` and `transports`:
    by default, those for the device. Raises `CheckpointError`, or `ConfigError`, also if the journal is of another
    measurement."""
    if minutes <= 0.0:
        raise ConfigError(f"--measure-minutes must be positive, not {minutes:g}", param="measure_minutes")
    config = msgspec.structs.replace(config or ServeConfig(model=model), model=model)
    on_gpu, say = torch_device(config).type == "cuda", on_progress or (lambda _share, _what: None)
    grid = grid or (GPU_GRID if on_gpu else Grid())
    transports = (("cuda-ipc", "tcp") if on_gpu else ("shared-memory", "tcp")) if transports is None else transports
    note = _note(busy_cores(1.0))
    say(0.0, "loading the model")
    loaded = load_whole(config)
    cases, too_large = _cases(loaded, config, grid)
    if too_large:
        say(0.0, f"too large for the free memory, and left out: {'; '.join(case.title for case in too_large)}")
    rig = _rig(loaded, config, grid, cases)
    head = _JournalHead(
        name_of(model_folder(config)), str(loaded.device), rig.dtype, rig.n_threads, config.quantization
    )
    try:
        samples = _Journal(journal, head)
        _measure(rig, cases, samples, 60.0 * minutes * (1 - _COPIES_SHARE if transports else 1.0), say)
    finally:
        rig.close()
    copies: list[Copies] = []
    if transports:
        specs = [*([] if rig.embed is None else [rig.embed]), *rig.kv]
        copies = measure_copies(specs, transports, head.device, 60.0 * minutes * _COPIES_SHARE, say)
    points = samples.points()
    _check_seen(points, bool(rig.picture_tokens), minutes)
    file = _fitted(head, note, points, copies)
    if too_large:
        left = f"{len(too_large)} batches, from {too_large[0].title} on, did not fit the memory and were not measured"
        file = msgspec.structs.replace(file, note="; ".join(filter(None, (file.note, left))))
    say(1.0, "done")
    return file


def _cases(model: Model, config: ServeConfig, grid: Grid) -> tuple[list[Case], list[Case]]:
    """The cases of `grid` that fit the model's context and, on a GPU, the free memory; and those too large for it.
    Raises `ConfigError` if no language batch fits."""
    described = model.config
    tokens = sorted(pictures_of(described, grid.sizes))
    kv, embed = specs_for(model, config)
    n_embeddings = max(grid.pictures) * max(tokens, default=0)
    room = _room(model, config, grid, n_embeddings)
    if embed is not None:
        room -= max(grid.pictures) * embed.blocks_for(tokens[-1]) * embed.block_bytes
    cases = cases_of(grid, described.text.context, tokens, lambda work: bytes_of(blocks_of(work, kv)) <= room)
    kept = fitting(cases, kv, room)
    if not any(case.language for case in kept):
        raise ConfigError("the device has no memory for a measurement beside the weights: use a smaller model or dtype")
    return kept, [case for case in cases if case not in kept]


def _room(model: Model, config: ServeConfig, grid: Grid, n_embeddings: int) -> float:
    """The bytes that caches may have. On a CPU there is no limit."""
    if model.device.type == "cpu":
        return math.inf
    most = max(*grid.decodes, *grid.mixed)
    rows = Rows(max(grid.chunks) + most, most, model.config.text.context, n_embeddings)
    dtype = str(model.dtype).removeprefix("torch.")
    beside = workspace_bytes(model.config, model.role, dtype, rows, config.block_tokens)
    return free_bytes(config, model.device, config.gpu_share, model.weight_bytes) - beside


def _rig(model: Model, config: ServeConfig, grid: Grid, cases: Sequence[Case]) -> Rig:
    works = [case.language for case in cases]
    return Rig(config, grid.sizes, max(grid.pictures), [work for work in works if work is not None], model)


def _fitted(head: _JournalHead, note: str, points: Sequence[BatchTime], copies: Sequence[Copies]) -> CostFile:
    """The file of a measurement, with the cost model that fits it best. `note`: a warning if the machine was not
    quiet."""
    fitted = fit_cost(points, "min_s" if note else "p50_s")
    return CostFile(
        kind="measured",
        model=head.model,
        device=head.device,
        dtype=head.dtype,
        quantization=head.quantization,
        threads=head.threads,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hardware=_hardware(),
        versions=versions(_PACKAGES),
        note=note,
        cost=fitted.cost,
        errors=fitted.errors,
        points=tuple(points),
        copies=tuple(copies),
    )


def _check_seen(points: Sequence[BatchTime], sees: bool, minutes: float) -> None:
    """Check that every stage was measured: one without samples would cost nothing. Raises `ConfigError`."""
    works = [p.work for p in points]
    seen = {
        "encode": not sees or any(w.is_vision for w in works),
        "prefill": any(w.chunk for w in works),
        "decode": any(w.decodes for w in works),
    }
    if missing := [stage for stage, is_there in seen.items() if not is_there]:
        raise ConfigError(
            f"{minutes:g} minutes were too few to measure {' and '.join(missing)} even once; what was measured is "
            "kept, so run it again, or give it more",
            param="measure_minutes",
        )


def _measure(rig: Rig, cases: list[Case], samples: _Journal, budget_s: float, say: OnMeasured) -> None:
    """Repeat passes over all cases until the time is up or each is known; at least one case, so that there is a
    result."""
    begin_s = time.perf_counter()
    warm: set[Case] = set()
    while todo := [c for c in cases if not samples.known(c)]:
        for case in todo:
            spent_s = time.perf_counter() - begin_s
            if spent_s > budget_s and warm:
                return
            done = len(warm) / len(cases) if len(warm) < len(cases) else 1.0
            say(min(1.0, max(spent_s / budget_s, 0.0)), f"{case.title} ({done:.0%} of the cases seen)")
            if case not in warm:
                warm.add(case)
                if case.beside is None:
                    rig.run(case.work)
            samples.add(case, *_sample(rig, case))


def _sample(rig: Rig, case: Case) -> tuple[list[float], list[float]]:
    if case.beside is not None:
        return rig.run_beside(case.work, case.beside, _BESIDE_S, 2)
    took: list[float] = []
    while sum(took) < _LEAST_S or len(took) < 2:
        took.append(rig.run(case.work))
    return took, []


class _Journal:
    """The samples by case, kept in a file if one is given."""

    def __init__(self, path: Path | None, head: _JournalHead) -> None:
        self._path = path
        self._seen: dict[Case, tuple[list[float], list[float]]] = {}
        if path is None:
            return
        try:
            if path.exists():
                self._read(path, head)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(msgspec.json.encode(head) + b"\n")
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror}", param="out") from None

    def known(self, case: Case) -> bool:
        """Whether there are enough samples of a case, or their median is certain enough."""
        return all(map(_is_known, self._seen.get(case, ([], []))[: 1 if case.beside is None else 2]))

    def add(self, case: Case, seconds: list[float], beside_seconds: list[float]) -> None:
        self._keep(case, seconds, beside_seconds)
        if self._path is not None:
            rounded, others = ([round(s, 7) for s in some] for some in (seconds, beside_seconds))
            line = _JournalLine(case.work, rounded, case.beside, others)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def points(self) -> list[BatchTime]:
        """One point per case, or two if both lanes ran."""
        found = []
        for (work, beside), (seconds, others) in self._seen.items():
            found.append(_point(work, beside, seconds))
            if beside is not None and others:
                found.append(_point(beside, work, others))
        return found

    def _keep(self, case: Case, seconds: list[float], beside_seconds: list[float]) -> None:
        mine, others = self._seen.setdefault(case, ([], []))
        mine += seconds
        others += beside_seconds

    def _read(self, path: Path, head: _JournalHead) -> None:
        first, *lines = path.read_bytes().splitlines() or [b""]
        try:
            found = msgspec.json.decode(first, type=_JournalHead)
        except msgspec.DecodeError:
            raise ConfigError(f"{path} is no journal of a measurement; name another file", param="out") from None
        if found != head:
            raise ConfigError(
                f"{path} is of {found.model} on {found.device} in {found.dtype} with {found.threads} threads, not of "
                f"{head.model} on {head.device} in {head.dtype} with {head.threads}; remove it or name another file",
                param="out",
            )
        for line in lines:
            try:
                entry = msgspec.json.decode(line, type=_JournalLine)
            except msgspec.DecodeError:
                continue  # cut off when the run was stopped
            self._keep(Case(entry.work, entry.beside), entry.seconds, entry.beside_seconds)


def _is_known(seconds: Sequence[float]) -> bool:
    """Whether there are many samples, or a few whose median has a small standard error, judging by their quartiles."""
    if len(seconds) < _FEW or len(seconds) >= _ENOUGH:
        return len(seconds) >= _ENOUGH
    low, middle, high = statistics.quantiles(seconds, n=4)
    return 0.93 * (high - low) / math.sqrt(len(seconds)) <= _KNOWN * middle  # 1.25 deviations of a normal variable


def _point(work: BatchShape, beside: BatchShape | None, seconds: list[float]) -> BatchTime:
    ordered = sorted(seconds)
    least, p50, p90 = (round(s, 7) for s in (ordered[0], statistics.median(ordered), at_quantile(ordered, 0.9)))
    return BatchTime(work=work, beside=beside, n=len(ordered), min_s=least, p50_s=p50, p90_s=p90)


def _note(busy: float) -> str:
    cores = n_cores()
    if busy <= _QUIET_CORES * cores:
        return ""
    return (
        f"the machine was NOT quiet: {busy:.1f} of {cores} cores were busy before the measurement; the cost model "
        "is fitted to the fastest run of each batch, percentiles are those of a loaded machine; repeat it"
    )


def _hardware() -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"cpu": cpu_name(), "cores": n_cores(), "memory_bytes": memory_bytes()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found

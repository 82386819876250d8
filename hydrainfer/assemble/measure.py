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
from typing import NamedTuple

import msgspec
import torch

from hydrainfer.assemble.copies import measure_copies
from hydrainfer.assemble.rig import Rig
from hydrainfer.assemble.sizes import torch_device
from hydrainfer.checkpoint import model_folder, name_of
from hydrainfer.config import ServeConfig
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError
from hydrainfer.machine import busy_cores, cpu_name, memory_bytes, n_cores, versions
from hydrainfer.metrics import at_quantile
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


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The grid of measurements. `sizes`: those of pictures, in pixels. Chunks are prefilled alone after a context of
    each of `starts`, and together with `mixed` decodes of every context. Each of `beside`, (decodes, chunk), runs
    beside vision batches of `pictures_beside` pictures. Cases that do not fit the model's context are left out."""

    sizes: tuple[tuple[int, int], ...] = ((336, 336), (640, 480), (1024, 768))
    pictures: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048)
    starts: tuple[int, ...] = (0, 256, 1024)
    decodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 256, 1024)
    mixed: tuple[int, ...] = (4, 16)
    beside: tuple[tuple[int, int], ...] = ((1, 0), (16, 0), (16, 64), (16, 256), (0, 256))
    pictures_beside: tuple[int, ...] = (1, 4)

    @property
    def n_context(self) -> int:
        return max([*(c + 1 for c in self.contexts), *(s + c for s in self.starts for c in self.chunks)])

    @property
    def n_sequences(self) -> int:
        return max([*self.decodes, *self.mixed, *(n for n, _ in self.beside)]) + 1


GPU_GRID = Grid(
    pictures=(1, 2, 4, 8, 16),
    chunks=(16, 128, 512, 1024, 2048, 4096, 8192),
    starts=(0, 1024, 4096),
    decodes=(1, 4, 16, 32, 64, 128, 256),
    contexts=(256, 1024, 4096, 8191),
    mixed=(16, 64),
    beside=((1, 0), (64, 0), (64, 256), (64, 1024), (0, 2048)),
)
"""The grid for a GPU, which serves more and longer requests at once."""


class _Case(NamedTuple):
    """A batch of one lane or, with `beside`, batches of both lanes, the vision batch first."""

    work: BatchShape
    beside: BatchShape | None = None


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
    rig = Rig(config, list(grid.sizes), max(grid.pictures), grid.n_sequences, grid.n_context)
    device = str(rig.model.device)
    head = _JournalHead(name_of(model_folder(config)), device, rig.dtype, rig.n_threads, config.quantization)
    try:
        samples = _Journal(journal, head)
        budget_s = 60.0 * minutes * (1 - _COPIES_SHARE if transports else 1.0)
        _measure(rig, _cases(grid, rig), samples, budget_s, say)
        copies: list[Copies] = []
        if transports:
            specs = [*([] if rig.embed is None else [rig.embed]), *rig.kv]
            copies = measure_copies(specs, transports, device, 60.0 * minutes * _COPIES_SHARE, say)
    finally:
        rig.close()
    points = samples.points()
    _check_seen(points, bool(rig.picture_tokens), minutes)
    file = _fitted(head, note, points, copies)
    say(1.0, "done")
    return file


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


def _cases(grid: Grid, rig: Rig) -> list[_Case]:
    """All cases of `grid` that fit the model, short ones first."""
    limit = rig.n_context
    contexts = [c for c in grid.contexts if c < limit]
    context = contexts[len(contexts) // 2]
    cases = {_Case(BatchShape(decodes=n, context=c)): None for c in contexts for n in grid.decodes}
    chunks = [(c, s) for s in grid.starts for c in grid.chunks if s + c <= limit]
    cases |= {_Case(BatchShape(chunk=c, start=s)): None for c, s in chunks}
    for c in (c for c, s in chunks if s == 0):
        cases |= {_Case(BatchShape(chunk=c, decodes=n, context=x)): None for n in grid.mixed for x in contexts}
    for tokens in rig.picture_tokens:
        cases |= {_Case(BatchShape(pictures=n, tokens=tokens)): None for n in grid.pictures}
        for n in grid.pictures_beside:
            vision = BatchShape(pictures=n, tokens=tokens)
            for decodes, chunk in grid.beside:
                if chunk <= limit:
                    language = BatchShape(chunk=chunk, decodes=decodes, context=context if decodes else 0)
                    cases |= {_Case(language): None, _Case(vision): None, _Case(vision, language): None}
    return list(cases)


def _measure(rig: Rig, cases: list[_Case], samples: _Journal, budget_s: float, say: OnMeasured) -> None:
    """Repeat passes over all cases until the time is up or each is known; at least one case, so that there is a
    result."""
    begin_s = time.perf_counter()
    warm: set[_Case] = set()
    while todo := [c for c in cases if not samples.known(c)]:
        for case in todo:
            spent_s = time.perf_counter() - begin_s
            if spent_s > budget_s and warm:
                return
            done = len(warm) / len(cases) if len(warm) < len(cases) else 1.0
            say(min(1.0, max(spent_s / budget_s, 0.0)), f"{_title(case)} ({done:.0%} of the cases seen)")
            if case not in warm:
                warm.add(case)
                if case.beside is None:
                    rig.run(case.work)
            samples.add(case, *_sample(rig, case))


def _sample(rig: Rig, case: _Case) -> tuple[list[float], list[float]]:
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
        self._seen: dict[_Case, tuple[list[float], list[float]]] = {}
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

    def known(self, case: _Case) -> bool:
        """Whether there are enough samples of a case, or their median is certain enough."""
        return all(map(_is_known, self._seen.get(case, ([], []))[: 1 if case.beside is None else 2]))

    def add(self, case: _Case, seconds: list[float], beside_seconds: list[float]) -> None:
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

    def _keep(self, case: _Case, seconds: list[float], beside_seconds: list[float]) -> None:
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
            self._keep(_Case(entry.work, entry.beside), entry.seconds, entry.beside_seconds)


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


def _title(case: _Case) -> str:
    return " beside ".join(
        f"encode {w.pictures} × {w.tokens}"
        if w.is_vision
        else " + ".join(
            part
            for n, part in (
                (w.chunk, f"prefill {w.chunk} at {w.start}"),
                (w.decodes, f"decode {w.decodes} × {w.context}"),
            )
            if n
        )
        for w in case
        if w is not None
    )


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

"""`hydrainfer profile --clusters`: the preparation of a question over clusters and links."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from hydrainfer.checkpoint import locate_model, name_of
from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.flags import check_out
from hydrainfer.planner.clusters import (
    Cluster,
    ClusterEntry,
    ClusterFile,
    Clusters,
    ClusterTable,
    DecodeBatch,
    Objective,
    Roofline,
    Times,
    TtftLimit,
    decodes_per_s,
    read_clusters,
    read_table,
)
from hydrainfer.planner.costs import WEIGHT_BYTES, ModelShape, read_engine, read_hardware
from hydrainfer.planner.inputs import shape_of
from hydrainfer.profiling.lengths import Prompts, read_prompts
from hydrainfer.profiling.options import Profile, changed_flags
from hydrainfer.profiling.question import slo_of
from hydrainfer.workload.sources import read_workload

_USED = (
    *("model", "clusters", "workload", "data", "pictures", "slo", "target", "objective", "requests", "seed"),
    *("out", "json"),
)
_ROOFLINE = ("dtype", "weights", "engine")
OBJECTIVES: dict[str, Objective] = {"goodput": "rate", "cost": "cost"}


class Instance(NamedTuple):
    """One instance of a cluster. `batch`: what it decodes together; None if it only prefills. `table`: None if the
    times are assumed."""

    times: Times
    batch: DecodeBatch | None
    table: ClusterTable | None


class ClusterSetup(NamedTuple):
    """A question with all that its answer needs."""

    question: Profile
    name: str
    file: ClusterFile
    prompts: Prompts
    slo: Slo
    instances: dict[str, Instance]
    clusters: Clusters

    @property
    def ttft(self) -> TtftLimit | None:
        if self.slo.ttft_s is None:
            return None
        return TtftLimit(seconds=self.slo.ttft_s, share=self.question.target)


def prepare_clusters(q: Profile) -> ClusterSetup:
    """The setup of a question. Raises `ConfigError` or `CheckpointError` with a one-line message."""
    assert q.clusters is not None
    path, file = read_clusters(q.clusters)
    described = [name for name, entry in file.clusters.items() if entry.times is None]
    _check(q, file, bool(described))
    name = Path(q.model).name
    shape = None
    if described:
        name = name_of(locate_model(q.model))
        shape = msgspec.structs.replace(shape_of(q.model, _dtype(q)), weights=q.weights)
    workload = read_workload(q.workload, data=q.data, pictures=q.pictures)
    slo = slo_of(q.slo, name, workload.dataset)
    if slo.e2e_s is not None:
        raise ConfigError("--slo e2e is not planned for with --clusters: give ttft and tpot", param="slo")
    if slo.ttft_s is None and "target" in changed_flags(q):
        raise ConfigError("--target is for a limit of the TTFT, and --slo has none: leave it out", param="target")
    prompts = read_prompts(q, workload, name, is_here=bool(described))
    instances = {}
    for cluster, entry in file.clusters.items():
        where = f"{path}: clusters.{cluster}"
        if entry.times is not None:
            instances[cluster] = _measured(path.parent / entry.times, entry, name, prompts, slo, where)
        else:
            assert shape is not None
            instances[cluster] = _described(q, shape, entry, prompts, slo, where)
    clusters = _system(file, instances, prompts)
    return ClusterSetup(q, name, file, prompts, slo, instances, clusters)


def _check(q: Profile, file: ClusterFile, has_described: bool) -> None:
    """Raises `ConfigError` for options that mean nothing for clusters, and if `--out` cannot be a folder."""
    if q.devices:
        raise ConfigError("--devices is for devices in one place: leave it out, or --clusters", param="devices")
    for name in changed_flags(q):
        flag = name.replace("_", "-")
        if name in _ROOFLINE and not has_described:
            raise ConfigError(
                f"--{flag} is for clusters without measured times, and all have them: leave it out", param=name
            )
        if name not in (*_USED, *_ROOFLINE):
            raise ConfigError(f"--{flag} means nothing with --clusters: leave it out", param=name)
    if q.objective not in OBJECTIVES:
        raise ConfigError(f"--objective is goodput or cost with --clusters, not {q.objective!r}", param="objective")
    if q.objective == "cost" and not file.has_prices:
        raise ConfigError("--objective cost needs the price of each cluster", param="objective")
    if not 0.0 < q.target <= 1.0:
        raise ConfigError(f"--target is a share above 0 and at most 1, not {q.target:g}", param="target")
    if q.weights not in ("as-dtype", *WEIGHT_BYTES):
        raise ConfigError(f"no weights {q.weights!r}; there are as-dtype, {', '.join(WEIGHT_BYTES)}", param="weights")
    if q.out is not None:
        check_out(q.out)


def _dtype(q: Profile) -> str | None:
    if q.dtype == "auto":
        return None
    return q.dtype


def _measured(path: Path, entry: ClusterEntry, name: str, prompts: Prompts, slo: Slo, where: str) -> Instance:
    """An instance with the times of a table. Raises `ConfigError` if they are of something else, or end too early."""
    table = read_table(path)
    if table.model != name:
        raise ConfigError(
            f"{path}: model: measured with {table.model}, not with {name}; that is the MODEL to give", param="model"
        )
    if (table.hardware, table.devices) != (entry.hardware, entry.tensor_parallel):
        raise ConfigError(
            f"{path}: hardware: measured on {table.devices} {table.hardware}, but {where} has instances of "
            f"{entry.tensor_parallel} {entry.hardware}",
            param="clusters",
        )
    longest = prompts.lengths.longest
    if longest > table.times.longest:
        raise ConfigError(
            f"{path}: prefill: the last point has {table.times.longest:,.0f} tokens, but prompts of "
            f"{prompts.summary['dataset']} have up to {longest:,.0f}: measure as many, or plan for shorter ones",
            param="times",
        )
    batch = None
    if "D" in entry.roles:
        try:
            batch = table.batch(slo.tpot_s)
        except ConfigError as e:
            raise ConfigError(f"{path}: {e.message}", param=e.param) from None
    return Instance(table.times, batch, table)


def _described(q: Profile, shape: ModelShape, entry: ClusterEntry, prompts: Prompts, slo: Slo, where: str) -> Instance:
    """An instance with the times of a roofline. Raises `ConfigError` if the model does not fit it."""
    lengths, n_output = prompts.lengths, prompts.n_output
    if lengths.longest + n_output > shape.context:
        raise ConfigError(
            f"{shape.name} takes {shape.context:,} tokens, prompts of {prompts.summary['dataset']} with their answers "
            f"have up to {lengths.longest + n_output:,.0f}",
            param="workload",
        )
    try:
        device = read_hardware(entry.hardware).joined(entry.tensor_parallel)
        decodes = "D" in entry.roles
        roofline = Roofline(shape, device, read_engine(q.engine), decodes=decodes)
        batch = None
        if decodes:
            n_held = lengths.mean_tokens + n_output
            batch = roofline.batch(n_held - n_output / 2, n_held, slo.tpot_s)
    except ConfigError as e:
        raise ConfigError(f"{where}.hardware: {e.message}", param=e.param) from None
    return Instance(roofline.times(lengths.shortest, lengths.longest), batch, None)


def _system(file: ClusterFile, instances: dict[str, Instance], prompts: Prompts) -> Clusters:
    clusters = {}
    for name, entry in file.clusters.items():
        times, batch, _ = instances[name]
        rate = 0.0
        if batch is not None:
            rate = decodes_per_s(batch.sequences, batch.step_s, prompts.n_output)
        clusters[name] = Cluster(
            name=name,
            times=times,
            instances=entry.instances,
            devices=entry.tensor_parallel,
            price=entry.price or 0.0,
            decodes_per_s=rate,
        )
    return Clusters(
        home=clusters[file.home],
        lengths=prompts.lengths,
        far=tuple(clusters[name] for name in file.far),
        links=tuple(link.link for link in file.links),
    )

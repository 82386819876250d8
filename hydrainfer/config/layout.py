"""Layouts, with each instance's share of its machine: `1E1P1D`, or a YAML file as in configs/layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from hydrainfer.config.read import check_known, read_yaml
from hydrainfer.config.schema import ServeConfig
from hydrainfer.core import ConfigError, Layout, Role, Stage
from hydrainfer.machine import n_cores

_Amount = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_Core = Annotated[int, Meta(ge=0)]


class MachineShare(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's share of a machine. `cpus`, `gpus`, `resources`: those of a Ray node, for placement; a fraction of
    one GPU shares it. `cores`: the cores that the instance is pinned to. `threads`: the number of compute threads. None
    is resolved later: `cpus` by the launcher, `gpus` by the device, `threads` by `threads_of_one`."""

    cpus: _Share | None = None
    gpus: _Share | None = None
    resources: dict[str, _Amount] = {}
    cores: tuple[_Core, ...] = ()
    threads: _Count | None = None

    def threads_of_one(self, n_instances: int) -> int:
        """The number of compute threads of this instance. If nothing says what its share is, it is one of `n_instances`
        that divide this machine's cores."""
        return self.threads or len(self.cores) or int(self.cpus or 0) or max(1, n_cores() // n_instances)

    def of_memory(self, n_instances: int) -> float:
        """The share of this machine's memory: that of its cores, where `cpus` says it, else an equal one."""
        return min(1.0, self.cpus / n_cores()) if self.cpus else 1 / n_instances


class InstanceSpec(NamedTuple):
    """One instance of a layout. `own`: its own options, which replace those of the whole server."""

    name: str
    role: Role
    share: MachineShare
    own: Mapping[str, Any]


class _LayoutEntry(MachineShare, frozen=True, kw_only=True):
    """An entry of a layout file: `count` instances of a kind."""

    role: str
    count: _Count = 1
    kv_cache_gib: _Amount | None = None
    image_cache_gib: _Amount | None = None
    host_cache_gib: _Share | None = None
    store: str | None = None
    token_budget: _Count | None = None
    image_budget: _Count | None = None
    max_running: _Count | None = None
    overlap: Literal["free", "step", "off", "slice"] | None = None


_OWN = (
    *("kv_cache_gib", "image_cache_gib", "host_cache_gib", "store"),
    *("token_budget", "image_budget", "max_running", "overlap"),
)
_GROUP_KEYS = [f.name for f in msgspec.structs.fields(_LayoutEntry)]


_DOES = {Stage.ENCODE: "encodes pictures", Stage.PREFILL: "prefills prompts", Stage.DECODE: "decodes answers"}


def in_words(specs: Sequence[InstanceSpec]) -> str:
    """What the instances of a layout do: "1 instance that encodes pictures, 2 that prefill prompts and decode
    answers"."""
    counts, phrases = Counter(spec.role for spec in specs), list[str]()
    for role, n in counts.items():
        does = [text if n == 1 else text.replace("s ", " ", 1) for stage, text in _DOES.items() if role.runs(stage)]
        noun = {(True, True): " instance", (True, False): " instances"}.get((not phrases, n == 1), "")
        phrases.append(f"{n}{noun} that {' and '.join(filter(None, [', '.join(does[:-1]), does[-1]]))}")
    return ", ".join(phrases)


def read_layout(text: str) -> tuple[InstanceSpec, ...]:
    """The instances of a layout. `text`: a layout or the path of a file (.yaml, .yml). Raises `ConfigError` with a
    message of one line."""
    if text == "auto":
        raise ConfigError("--layout auto is for `hydrainfer serve`; here, name one such as 1E1PD", param="layout")
    if Path(text).suffix not in (".yaml", ".yml"):
        return _named([(role, _LayoutEntry(role=str(role))) for role in Layout.parse(text).instances])
    path = Path(text).expanduser()
    content = read_yaml(path)
    for key in content:
        check_known(key, ["instances"], str(path))
    entries = content.get("instances")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must have a list `instances`, each with a role", param="layout")
    groups = [_group(entry, f"{path}, instance {i}") for i, entry in enumerate(entries, 1)]
    specs = _named([(Role.parse(g.role), g) for g in groups for _ in range(g.count)])
    missing = [s.value for s in (Stage.PREFILL, Stage.DECODE) if not any(spec.role.runs(s) for spec in specs)]
    if missing:
        raise ConfigError(f"{path} has no instance that runs {' or '.join(missing)}", param="layout")
    return specs


def settle(specs: Sequence[InstanceSpec], config: ServeConfig, on_gpu: bool) -> tuple[InstanceSpec, ...]:
    """The instances with open shares filled in from the options `cpu_share`, `gpu_share` (0 if instances run on the
    CPU) and `threads` (the total of all instances)."""

    def settled(share: MachineShare) -> MachineShare:
        cpus = config.cpu_share if share.cpus is None else share.cpus
        gpus = (config.gpu_share if on_gpu else 0.0) if share.gpus is None else share.gpus
        threads = share.threads
        if threads is None and config.threads is not None and not share.cores:
            threads = max(1, config.threads // len(specs))
        return msgspec.structs.replace(share, cpus=cpus, gpus=gpus, threads=threads)

    return tuple(spec._replace(share=settled(spec.share)) for spec in specs)


def stores_of(config: ServeConfig, specs: Sequence[InstanceSpec]) -> list[str]:
    """The shared stores of these instances, each once, as they are written; that of the options if there are none."""
    texts = [spec.own.get("store", config.store) for spec in specs] or [config.store]
    return list(dict.fromkeys(text for text in texts if text is not None))


def choose_launcher(config: ServeConfig, specs: Sequence[InstanceSpec]) -> Literal["inproc", "ray"]:
    """The launcher of the instances. With auto it is Ray for several instances, or if there is something to place.
    Raises `ConfigError` if `inproc` cannot do what is asked."""
    placed = [f"{s.name}'s share of a node" for s in specs if s.share.resources or s.share.cores]
    placed += [f"{s.name}'s share of a node" for s in specs if s.share.cpus or s.share.gpus]
    placed += ["--cpu-share"] if config.cpu_share is not None else []
    placed += ["--cluster-host"] if config.cluster_host is not None and len(specs) == 1 else []
    placed += ["--ray-address"] if config.ray_address is not None else []
    if config.launcher == "auto":
        return "ray" if len(specs) > 1 or placed else "inproc"
    if config.launcher == "inproc" and placed:
        raise ConfigError(f"{placed[0]} needs --launcher ray", param="launcher")
    return config.launcher


def _group(entry: Any, where: str) -> _LayoutEntry:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must hold keys and values, at least a role", param="layout")
    for key in entry:
        check_known(key, _GROUP_KEYS, where)
    try:
        group = msgspec.convert({k: v for k, v in entry.items() if v is not None}, _LayoutEntry)
        Role.parse(group.role)
    except (msgspec.ValidationError, ConfigError) as e:
        text = str(e)
        raise ConfigError(f"{where}: {text[0].lower()}{text[1:]}", param="layout") from None
    wrong = _wrong(group)
    if wrong:
        raise ConfigError(f"{where}: {wrong}", param="layout")
    return group


def _wrong(group: _LayoutEntry) -> str | None:
    """A message about values in a group that have the right types but are wrong; None if there are none."""
    for key, value in {**msgspec.structs.asdict(group), **group.resources}.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} must be finite, got {value}"
    for name in ("CPU", "GPU"):
        if name in group.resources:
            return f"{name} is given by its own key, {name.lower()}s"
    if group.gpus is not None and group.gpus > 1:  # Ray would reserve them, and the instance use one
        return f"gpus must be at most 1, got {group.gpus:g}: an instance computes on one device; take more instances"
    return None


def _named(groups: list[tuple[Role, _LayoutEntry]]) -> tuple[InstanceSpec, ...]:
    """The instances with their names: E0, E1, P0 …"""
    seen: Counter[Role] = Counter()
    specs = []
    for role, g in groups:
        share = MachineShare(**{f.name: getattr(g, f.name) for f in msgspec.structs.fields(MachineShare)})
        own = {name: value for name in _OWN if (value := getattr(g, name)) is not None}
        specs.append(InstanceSpec(f"{role}{seen[role]}", role, share, own))
        seen[role] += 1
    return tuple(specs)

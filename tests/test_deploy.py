"""What deploy/ names exists: options, files and commands."""

import json
import re
from pathlib import Path

import pytest
import yaml

from hydrainfer.config import load
from hydrainfer.core import InstanceInfo, InstanceStats, Layout
from hydrainfer.metrics import HttpCounts, PrometheusRecorder
from hydrainfer.metrics.prometheus import QueueStats

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def test_options_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["hydrainfer"]
    assert load({}, environ=compose["environment"]).config.layout == "1E1P1D"
    words = (DEPLOY / "Dockerfile").read_text() + (DEPLOY / "hydrainfer.service").read_text()
    given = dict(re.findall(r"(HYDRAINFER_\w+)=(\S+)", words))
    config = load({}, environ=given).config
    assert (config.host, config.log_format) == ("0.0.0.0", "json")
    grace_s = int(compose["stop_grace_period"].removesuffix("s"))
    assert min(grace_s, int(re.search(r"TimeoutStopSec=(\d+)", words)[1])) > config.drain_s + 5


def test_kubernetes_asks_what_there_is():
    service, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    config = load({}, environ={e["name"]: e["value"] for e in server["env"]}).config
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert config.port == server["ports"][0]["containerPort"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 5
    assert {m["name"] for m in server["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    paths = {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/health", "/ready"}


def test_a_ray_cluster_has_a_worker_for_each_instance():
    service, _, cluster = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    spec = cluster["spec"]
    head, (workers,) = spec["headGroupSpec"]["template"], spec["workerGroupSpecs"]
    ray, server = head["spec"]["containers"]
    config = load({}, environ={e["name"]: e.get("value", "10.0.0.1") for e in server["env"]}).config
    assert config.ray_address == "$(POD_IP):6379" and config.cluster_host == "$(POD_IP)"
    assert workers["replicas"] == len(Layout.parse(config.layout).instances)
    assert config.cpu_share == float(workers["rayStartParams"]["num-cpus"])
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    assert head["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 5
    assert re.search(rf"^ray=={spec['rayVersion']}$", (ROOT / "constraints.txt").read_text(), re.M)
    for pod in (head["spec"], workers["template"]["spec"]):
        mounted = {m["name"] for container in pod["containers"] for m in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {m["name"] for m in ray["volumeMounts"]} <= {m["name"] for m in server["volumeMounts"]}


def test_files_exist():
    copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert copied and all((ROOT / name).exists() for line in copied for name in line.split())
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["hydrainfer"]["build"]["context"] == ".."


def test_metrics_of_the_dashboard_exist():
    stats = InstanceStats("EPD", 0, 0, 0, 0, 0, {"kv": (8, 0, 0)}, 0, 0, 0, 0, 0.0, tokens_from={"host": 0})
    infos = [InstanceInfo("EPD0", "EPD", "alive", stats=stats)]
    page = PrometheusRecorder("m", lambda: infos, lambda: QueueStats({"text": 0.0}, {"queue": 0})).page().decode()
    page += HttpCounts().page().decode()
    there = set(re.findall(r"# TYPE (\S+)", page))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name.removesuffix("_bucket") for expr in asked for name in re.findall(r"\b(?:hydrainfer:|http_)\w+", expr)}
    assert len(asked) > 20 and named and named <= there, named - there

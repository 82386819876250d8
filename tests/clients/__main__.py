"""Clients that people use against a real server, each in an environment of its own: `make test-clients`.

    python -m tests.clients [NAME ...] [--report FILE]

Installs what it tests under .cache/clients; what cannot be installed is skipped, with the reason. Exit status 1 if a
check is bad.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints_text import make_text
from tests.server.tool_templates import HERMES

LIGHT = {  # the script in `checks`, and what it needs, the first being the client; also run by `make test`
    "openai": ("with_openai.py", ["openai==3.52.0"]),
    "anthropic": ("with_anthropic.py", ["anthropic==2.12.0"]),
    "ollama": ("with_ollama.py", ["ollama==0.6.3"]),
}
CLIENTS = LIGHT | {
    "langchain": ("with_langchain.py", ["langchain-openai==1.7.3"]),
    "litellm": ("with_litellm.py", ["litellm==1.109.1", "mcp"]),
    "instructor": ("with_instructor.py", ["instructor==1.17.0"]),
    "pydantic-ai": ("with_pydantic_ai.py", ["pydantic-ai-slim[openai]==2.68.0"]),
    "llama-index": ("with_llama_index.py", ["llama-index-llms-openai-like==0.8.1"]),
    "openai-agents": ("with_openai_agents.py", ["openai-agents==0.24.0"]),
    "lm-eval": ("with_lm_eval.py", ["lm-eval[api]==0.4.13", "transformers", "pydantic"]),
    "guidellm": ("with_guidellm.py", ["guidellm==0.8.1", "torch==2.13.0"]),
    "aiperf": ("with_aiperf.py", ["aiperf==0.13.0"]),
    "vllm-bench": ("with_vllm_bench.py", ["vllm"]),
}
ENVIRONMENTS = Path(".cache/clients")
PEERS = Path(os.environ.get("PEERS_HOME", "~/.cache/hydrainfer-peers")).expanduser()
CHECKS = Path(__file__).parent / "checks"
_INSTALL_S, _CHECK_S = 900, 300


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The variables that the checks read."""
    quiet = Console(quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(HERMES)
        tiny = make_text(Path(folder) / "tiny", "qwen2", seed=4)
        sees = load({"port": 0, "served_model_name": "shapes", "access_log": "false"})
        calls = load(
            {
                "port": 0,
                "model": str(tiny),
                "served_model_name": "tools",
                "chat_template": str(template),
                "tool_call_parser": "hermes",
                "access_log": "false",
            }
        )
        with serve_in_background(sees, quiet) as (one, parts), serve_in_background(calls, quiet) as (other, _):
            model = str(parts.intake.processor.model.path)
            yield {"CLIENTS_SEES": f"{one}/v1", "CLIENTS_CALLS": f"{other}/v1", "CLIENTS_MODEL": model}


def environment_of(name: str) -> Path:
    return PEERS / "venv" if name == "vllm-bench" else ENVIRONMENTS / name


def install(name: str, needs: list[str]) -> str:
    """Why it cannot be, "" if it is there."""
    folder = environment_of(name)
    if name == "vllm-bench":  # too large to be installed for this
        why = f"no vLLM in {folder}; benchmarks/peers/setup_vllmcpu.sh installs one, or set PEERS_HOME"
        return "" if (folder / "bin/vllm").exists() else why
    done = folder / ".installed"
    if done.is_file() and done.read_text() == " ".join(needs):
        return ""
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needs]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        return f"cannot be installed within {_INSTALL_S} s"
    except subprocess.CalledProcessError as e:
        lines = [line for line in str(e.stderr).splitlines() if line.strip()]
        return f"cannot be installed: {(lines or ['?'])[-1][:200]}"
    done.write_text(" ".join(needs))
    return ""


def check(name: str, script: str, needs: list[str], variables: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"client": needs[0], "ok": [], "bad": [], "skipped": install(name, needs)}
    if found["skipped"]:
        return found
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "PROXY" not in k.upper()}
    command = [str((environment_of(name) / "bin/python").absolute()), str((CHECKS / script).absolute())]
    begun_s = time.monotonic()
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_S, env=inherited | variables, check=False
        )
        lines, status = run.stdout.splitlines(), run.returncode
        if status:
            sys.stderr.write(run.stderr)
            found["bad"].append(f"ended with {status}: {(run.stderr.strip().splitlines() or ['?'])[-1][:300]}")
    except subprocess.TimeoutExpired as e:
        lines = (e.stdout or b"").decode().splitlines()
        found["bad"].append(f"not done within {_CHECK_S} s")
    found["seconds"] = round(time.monotonic() - begun_s, 1)
    for line in lines:
        state, _, rest = line.partition(" ")
        if state in ("ok", "bad"):
            found[state].append(rest)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--report", type=Path, help="write what was found here, as JSON")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CLIENTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(CLIENTS)}")
    results: dict[str, dict[str, Any]] = {}
    with servers() as variables:
        for name in given.names or CLIENTS:
            r = results[name] = check(name, *CLIENTS[name], variables)
            state = (
                f"skipped: {r['skipped']}" if r["skipped"] else f"{len(r['ok'])} of {len(r['ok']) + len(r['bad'])} ok"
            )
            print(f"{r['client']:45} {state}", flush=True)
            for line in r["bad"]:
                print(f"    bad {line}", flush=True)
    if given.report:
        revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        head = {
            "command": "python -m tests.clients",
            "revision": revision.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "python": sys.version.split()[0],
        }
        given.report.write_text(json.dumps(head | {"clients": results}, indent=1) + "\n")
    return int(any(r["bad"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""aiperf: synthetic chats, with pictures and without, at a concurrency.

Without a network it takes a tokenizer from a Hugging Face cache only, no folder and not its own: here is such a cache.
"""

import shutil
from pathlib import Path

from common import run
from tool import MODEL, ROOT_URL, home, results, run_tool

REVISION = "0" * 40


def cached(folder, name="local/shapes"):
    """The name under which a Hugging Face cache in `folder` has the model's tokenizer."""
    repo = Path(folder) / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(REVISION)
    shutil.copytree(MODEL, repo / "snapshots" / REVISION, ignore=shutil.ignore_patterns("*.safetensors"))
    return name


def measured(*words):
    with home() as folder:
        run_tool(
            *("aiperf", "profile", "--model", "shapes", "--url", ROOT_URL, "--endpoint-type", "chat"),
            *("--tokenizer", cached(folder), "--request-count", "12", "--concurrency", "3", "--ui", "none"),
            *("--isl", "32", "--osl", "8", "--artifact-dir", f"{folder}/found", *words),
            home=folder,
        )
        found = results(folder, "profile_export_aiperf.json")
    assert found["request_count"]["avg"] == 12 and not found.get("error_request_count"), found
    return found


def whole_answers():
    measured()


def streams():
    assert measured("--streaming")["time_to_first_token"]["avg"] > 0


def pictures():
    measured("--streaming", "--image-width-mean", "64", "--image-height-mean", "64")


if __name__ == "__main__":
    run(whole_answers, streams, pictures)

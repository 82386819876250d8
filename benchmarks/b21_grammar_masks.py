"""What does it add to a decode step of eight requests that each follows a grammar?

A made vocabulary of the size of Qwen's (151,936 columns), eight requests that walk at random through a JSON schema, and
what the sampler does for them: what may come next, and the mask put on the logits. Beside it the last layer of
Qwen2-VL-2B for eight rows in float32: 233 of the 1,544 million parameters that a decode step reads.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.command import options
from benchmarks.record import spread, write_result
from hydrainfer.core import Grammar
from hydrainfer.grammar import Follower, Guided, load_grammars
from hydrainfer.runtime.sampler import sample
from hydrainfer.runtime.sampling import SamplingPlan

N_COLUMNS, EOS, HIDDEN = 151_936, 150_000, 1536
PARAMETERS, HEAD = 1_544e6, N_COLUMNS * HIDDEN
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def vocabulary(path: Path) -> None:
    """Byte-level pairs joined at random, which spell words as long as a real vocabulary's."""
    rng, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    ids, merges = {c: i for i, c in enumerate(alphabet)}, []
    pieces = [c for c in alphabet if c.isascii()] + ["Ġ"]
    while len(ids) < EOS:
        pair = rng.choice(pieces), rng.choice(pieces)
        if len(joined := "".join(pair)) <= 12 and joined not in ids:
            ids[joined] = len(ids)
            merges.append(pair)
            pieces.append(joined)
    made = Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.save(str(path / "tokenizer.json"))


def walk(follower: Follower, n_rows: int, n_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds per step: what may come next, and that put on the logits, with the greedy choice that follows."""
    rng, grammar = random.Random(1), Grammar("json", json.dumps(SCHEMA))
    produced: list[list[int]] = [[] for _ in range(n_rows)]
    logits = torch.randn(n_rows, N_COLUMNS)
    asked_ms, masked_ms = [], []
    for _ in range(n_steps):
        plan = SamplingPlan(guided=[Guided(i, f"r{i}", grammar, tokens) for i, tokens in enumerate(produced)])
        begin_s = time.perf_counter()
        plan.blocked, failed = follower.blocked(plan.guided, N_COLUMNS)
        between_s = time.perf_counter()
        assert not failed
        fresh = logits.clone()
        clone_s = time.perf_counter()
        sample(fresh, plan).read()
        asked_ms.append((between_s - begin_s) * 1e3)
        masked_ms.append((time.perf_counter() - clone_s) * 1e3)
        for i, tokens in enumerate(produced):
            can = np.flatnonzero(~plan.blocked[i])
            token = int(rng.choice(can))
            produced[i] = [] if token == EOS else [*tokens, token]
    return asked_ms, masked_ms


def head_ms(n_rows: int, n_runs: int) -> list[float]:
    weights, hidden, took = torch.randn(N_COLUMNS, HIDDEN), torch.randn(n_rows, HIDDEN), []
    for _ in range(n_runs + 1):
        begin_s = time.perf_counter()
        torch.nn.functional.linear(hidden, weights)
        took.append((time.perf_counter() - begin_s) * 1e3)
    return took[1:]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vocabulary(Path(folder))
        begin_s = time.perf_counter()
        grammars = load_grammars(Path(folder), N_COLUMNS, (EOS,))
        load_s = time.perf_counter() - begin_s
    assert grammars is not None
    begin_s = time.perf_counter()
    grammars.compiled(Grammar("json", json.dumps(SCHEMA)))
    compile_ms = (time.perf_counter() - begin_s) * 1e3
    asked_ms, masked_ms = walk(Follower(grammars), args.rows, args.steps)
    grammars.close()
    head, added = spread(head_ms(args.rows, 10)), spread([a + b for a, b in zip(asked_ms, masked_ms)])
    assert head is not None and added is not None
    step_ms = head["median"] * PARAMETERS / HEAD
    results = {
        "load_s": load_s,
        "compile_ms": compile_ms,
        "next_ms": spread(asked_ms),
        "mask_ms": spread(masked_ms),
        "added_ms": added,
        "head_ms": head,
        "step_ms": step_ms,
        "share_of_step": added["median"] / step_ms,
    }
    print(json.dumps(results, indent=1))
    print(f"written to {write_result('b21_grammar_masks', __doc__, args, results)}")


if __name__ == "__main__":
    main()

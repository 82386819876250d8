"""The lengths of a workload's prompts, for plans over clusters: a distribution itself, or those of a trace."""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

from hydrainfer.core import CheckpointError, ConfigError
from hydrainfer.planner.clusters import Lengths, log_normal
from hydrainfer.planner.inputs import PromptRules, prompts_of, summary, words_to_tokens
from hydrainfer.planner.search import uncached_tokens
from hydrainfer.profiling.options import Profile, changed_flags
from hydrainfer.profiling.traces import requests_of
from hydrainfer.workload.sources import Spread, Workload

_QUANTILES = 1000
_NO_LIMIT = 1 << 40  # tokens
NO_CACHE = "Prefix caches: no prompt begins like another here, so that every token is prefilled."


class Prompts(NamedTuple):
    """What the workload asks for. `n_output`: mean tokens of an answer; `summary`: for the plan; `notes`: what the
    lengths leave out."""

    lengths: Lengths
    n_output: float
    summary: dict[str, str | float]
    notes: tuple[str, ...]


def read_prompts(q: Profile, workload: Workload, name: str, *, is_here: bool) -> Prompts:
    """The prompts of a workload for the model called `name`. `is_here`: whether that has to be a model that can be
    read; if not, and it cannot, its tokens are counted by words. Raises `ConfigError` or `CheckpointError`."""
    spread = workload.text_tokens
    lengths = _distribution(spread) if spread is not None else None
    if lengths is None:
        return _sampled(q, workload, name, is_here)
    if "requests" in changed_flags(q):
        raise ConfigError(
            f"--requests is for requests that are drawn, but the prompts of {workload.dataset} are a distribution: "
            "leave it out",
            param="requests",
        )
    answers = workload.lengths(name)
    n_output = fmean(max(1, round(answers.quantile((i + 0.5) / _QUANTILES))) for i in range(_QUANTILES))
    facts: dict[str, str | float] = {
        "dataset": workload.dataset,
        "source": "distribution",
        "prompt_mean": lengths.mean_tokens,
        "prompt_p90": lengths.quantile(0.9),
        "output_mean": n_output,
    }
    return Prompts(lengths, n_output, facts, (NO_CACHE,))


def _distribution(spread: Spread) -> Lengths | None:
    """The distribution itself; None if it can only be drawn from."""
    if spread.kind == "fixed":
        return Lengths.of([spread.a])
    if spread.kind == "truncated" and spread.least > 0.0 and spread.most < math.inf:
        return log_normal(math.log(spread.a), spread.b, spread.least, spread.most)
    return None


def _sampled(q: Profile, workload: Workload, name: str, is_here: bool) -> Prompts:
    """The uncached lengths of the prompts in a trace."""
    notes = []
    try:
        rules = prompts_of(q.model)
    except (ConfigError, CheckpointError):
        if is_here:
            raise
        rules = PromptRules(name, None, lambda text, _: words_to_tokens(text), _NO_LIMIT)
        notes.append(f"Tokens are counted by words, as {name} is not a model that can be read here.")
    trace = requests_of(q, workload, rules)
    uncached = uncached_tokens(trace)
    share = 1.0 - sum(uncached) / sum(t.n_prompt for t in trace)
    if share > 0.0:
        notes.append(
            f"Prefix caches: {share:.0%} of the prompts' tokens are left out, which an unlimited cache would have, as "
            "if a prompt always went where its beginning is cached."
        )
    else:
        notes.append(NO_CACHE)
    if any(t.pictures for t in trace):
        notes.append("Pictures count as tokens of their prompts; encoding them takes no time here.")
    facts: dict[str, str | float] = {"dataset": workload.dataset, "source": workload.source}
    facts.update(summary(trace))
    n_output = fmean(t.n_output for t in trace)
    return Prompts(Lengths.of([max(1, n) for n in uncached]), n_output, facts, tuple(notes))

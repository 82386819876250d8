"""What a page about a plan opens with: the choice, how sure it is, the command to start it, and what words mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from hydrainfer.planner.search import LayoutPlan
from hydrainfer.reports.drawing import answered
from hydrainfer.reports.plan.tables import answer, costs, uncertainties

STYLE = """
.launch code{display:block;padding:8px 10px}.words dl{display:grid;grid-template-columns:max-content minmax(0,1fr);
gap:4px 16px;font-size:14px}.words dt{font-weight:600}.words dd{margin:0;color:var(--text)}
.words summary{cursor:pointer}
@media(max-width:760px){.words dl{grid-template-columns:minmax(0,1fr)}
.words dd{margin-bottom:6px}}
"""
_GROUP = re.compile(r"(\d+)([EPD]+)(@([^+]+))?")
_VERBS = {"E": ("encodes", "encode"), "P": ("prefills", "prefill"), "D": ("decodes", "decode")}


def opening(plan: LayoutPlan) -> Iterator[str]:
    """The sections before the figures, as HTML."""
    choice = plan.choice
    sentences = answer(plan)
    if choice is not None and (words := in_words(choice.layout)):
        sentences.insert(1, f"{choice.layout} is {words}.")
    yield answered(sentences)
    if plan.launch:
        yield "<h3>To start it</h3><p class=launch><code>" + escape(plan.launch) + "</code></p>"
        yield "<p class=sub>layout.yaml lies beside this page.</p>"
    yield _list("What is uncertain", uncertainties(plan))
    yield _list("What it costs", costs(plan))
    rows = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in _meanings(plan))
    yield f"<details class=words><summary>What the words mean</summary><dl>{rows}</dl></details>"


def _list(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return f"<h3>{title}</h3><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def in_words(layout: str) -> str:
    """What the instances of a layout do, such as "1 instance that encodes and 3 that prefill and decode"."""
    parts: list[str] = []
    for count, letters, _, device in _GROUP.findall(layout):
        stages = [_VERBS[letter][count != "1"] for letter in letters]
        noun = ""
        if not parts:
            noun = " instance" if count == "1" else " instances"
        where = f" on {device}" if device else ""
        parts.append(f"{count}{noun}{where} that {_together(stages)}")
    return _together(parts)


def _together(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _meanings(plan: LayoutPlan) -> Iterator[tuple[str, str]]:
    each = "one device"
    if plan.per_instance > 1:
        each = f"{plan.per_instance} devices"
    yield (
        "1E3PD",
        f"a layout: one instance encodes pictures (E), three prefill prompts (P) and decode answers (D). An instance "
        f"has {each}. The method E+PD has such roles at any numbers; EPD does not split. In a layout such as "
        "1ED2P+1EPD, plus joins groups of instances that share the requests.",
    )
    yield "SLO", f"the limits that {plan.target * 100:g} % of the requests have to meet: {plan.slo}."
    yield "TTFT", "time to first token: from a request's arrival to the first token of its answer."
    yield "TPOT", "time per output token after the first. The column has the p90 of each request's mean."
    yield (
        "interval",
        f"what the SLO's TPOT is judged by: the time between tokens that {plan.slo.token_share:.0%} of a request's "
        "tokens keep. The column has its p90.",
    )
    yield "p90", "nine in ten requests have at most this."
    yield "goodput", "the highest rate, in requests per second, that meets the SLO in the long run."
    yield "95 %", "the interval in which the goodput is, with 95 % confidence: runs have only so many requests."
    yield (
        "lane",
        "an instance computes pictures on its vision lane and tokens on its language lane, both at once.",
    )
    yield (
        "least possible",
        "the time that the work would take with the best batches. A lane that decodes works all the time long before "
        "it is full; the least possible work tells how full it is. Where it reaches 100 %, there is the bound.",
    )
    yield (
        "encode gate",
        "an instance that also prefills encodes pictures only while no prompt is in prefill, as in the paper, so that "
        "prompts are not slowed down. A role that encodes apart has no such wait.",
    )
    yield "alone", "a request that has the devices for itself."
    yield "kv, embed", "caches: of prompts and answers (keys and values), and of encoded pictures."

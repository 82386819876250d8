"""The mixed batch of requests that every layout answers as one instance does."""

from __future__ import annotations

import threading
import time

from PIL import Image

from hydrainfer import SamplingParams
from hydrainfer.cluster import Hub, Pulse
from hydrainfer.scheduler.parking import Parking
from tests.checkpoints import make_picture
from tests.parts import parts
from tests.waiting import PATIENCE_S, wait_until

LAYOUTS = ["1E1P1D", "1EP1D", "1ED1P", "1E1PD", "2E1P2D", "1E2PD+1EPD", "4EPD"]
TRANSPORTS = ["local", "shared-memory", "gloo", "tcp"]
CHUNKED = {"token_budget": 32, "block_tokens": 4, "threads": 1, "native_kernels": False}
N_NEW = 10


def image(i):
    return {"type": "image", "image": Image.fromarray(make_picture(i, 56))}


def user(*parts):
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


CHATS = [
    user("Explain how a queue works."),
    user(image(1), "What is in this picture?"),
    user("Compare", image(2), "with", image(1), "and with", image(3)),
    user(image(4), "A long text: " + "one two three four five six " * 6),
    user("Only a long text, in chunks: " + "seven eight nine ten " * 8),
    user(image(1), "What is in this picture, again?"),
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=N_NEW),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, n=2, max_tokens=N_NEW),
    SamplingParams(
        temperature=0.8,
        seed=7,
        max_tokens=N_NEW,
        logprobs=2,
        repetition_penalty=1.2,
        presence_penalty=0.6,
        frequency_penalty=0.4,
    ),
]


class Logprob(float):
    """Equal within 1e-3: a sum's last bits depend on what is computed together."""

    __hash__ = None

    def __eq__(self, other):
        return abs(self - other) < 1e-3


def ask(llm, copies=1):
    """Greedy and seeded answers to the mixed batch."""
    chats = [c for c in CHATS for _ in PARAMS] * copies
    outputs = llm.chat(chats, PARAMS * len(CHATS) * copies, use_tqdm=False)
    found = [[(c.token_ids, [Logprob(x.logprob) for x in c.logprobs]) for c in out.outputs] for out in outputs]
    n = len(found) // copies
    assert all(found[i * n : (i + 1) * n] == found[:n] for i in range(copies)), "the same request, other tokens"
    return found[:n]


def check_moves(stats, layout):
    """Each picture and each KV cross once, and only where they must."""
    if layout in ("1E1P1D", "1E1PD", "1ED1P"):
        assert stats.blocks_pulled["embed"] == 4, "each of four pictures crosses once"
    if layout in ("1E1P1D", "1EP1D", "1ED1P"):
        n_requests = len(CHATS) * sum(p.n for p in PARAMS)
        # chats with pictures move twice, unless they come when these are computed, and go past the encoder
        n_pictures = 4 * sum(p.n for p in PARAMS) if layout != "1EP1D" else 0
        assert n_requests <= stats.n_landed <= n_requests + n_pictures, "each KV crosses once"
    if layout == "4EPD":
        assert stats.n_landed == 0 and not stats.blocks_pulled


def parkings(monkeypatch):
    """A list of where requests were parked in host memory, once for each that came back from there."""
    entered, enter = [], Parking.enter

    def tapped(self, *args):
        entered.append(self)
        enter(self, *args)

    monkeypatch.setattr(Parking, "enter", tapped)
    return entered


def settled_stats(llm):
    """The statistics that each instance made after this call and its last step."""
    engine = parts(llm).engine
    if isinstance(engine, Hub):
        hear_all(engine._side.census)
    else:
        between_steps = threading.Event()
        engine._post(lambda *_: between_steps.set())
        assert between_steps.wait(PATIENCE_S)
    return engine.stats()


def hear_all(census):
    """Wait until each instance has told statistics of more than a beat after this call."""
    told, heard = set(), census.heard
    since_s = time.monotonic() + Pulse().beat_s

    def noted(report, now):
        known = heard(report, now)
        if report.stats is not None and report.at_s >= since_s:
            told.add(report.name)
        return known

    census.heard = noted
    wait_until(lambda: told.issuperset(census.members), say=lambda: f"only {told} tell their statistics")
    census.heard = heard

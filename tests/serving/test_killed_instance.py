"""The whole thing once: a real model, instances of Ray, and SIGKILL to one of them in the middle of its answers."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import tempfile
from pathlib import Path

import pytest

from hydrainfer import LLM, SamplingParams
from hydrainfer.processor import parse_messages
from tests.checkpoints import make_llava
from tests.cluster.processes import alive, memories
from tests.equivalence.test_layouts import CHATS
from tests.parts import parts
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
N_NEW = 200
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=N_NEW, ignore_eos=True),
]
ASKED = [(c, p) for c in CHATS for p in PARAMS]


def start(path, **options):
    return LLM(path, threads=1, native_kernels=False, max_model_len=1024, **options)


async def answers(llm, during=lambda told: None):
    """The tokens of each, as they come; `during` hears their number after each of them."""
    told = [[] for _ in ASKED]

    async def one(i, chat, params):
        stream = await parts(llm).intake.chat(parse_messages(chat, local=True), params)
        async for deltas in stream:
            for delta in deltas:
                told[i] += delta.token_ids
                during(sum(map(len, told)))

    await asyncio.gather(*(one(i, *asked) for i, asked in enumerate(ASKED)))
    return told


def test_a_random_instance_dies_in_the_middle_of_its_answers(tmp_path):
    path = make_llava(tmp_path)
    gc.collect()
    before = memories([os.getpid()])  # of other tests
    with start(path, layout="1EPD", launcher="inproc") as llm:
        wanted = asyncio.run(answers(llm))
    with start(path, layout="1EP2D", launcher="ray") as llm:
        hub, killed = parts(llm).engine, []
        pids = {i.pid for i in hub.instances()}

        def kill_one(n_told):
            if n_told > len(ASKED) * N_NEW // 4 and not killed:
                killed.append(random.choice([i for i in hub.instances() if i.name != "EP0"]))
                os.kill(killed[0].pid, signal.SIGKILL)

        assert asyncio.run(answers(llm, kill_one)) == wanted
        assert hub._side.lives.n_recovered > 0
        wait_until(
            lambda: all(i.stats is not None and not leases(i.stats) for i in hub.instances()),
            say=hub.instances,
            patience_s=60,
        )
        (back,) = [i for i in hub.instances() if i.name == killed[0].name]
        assert back.incarnation > killed[0].incarnation
        pids |= {i.pid for i in hub.instances()}
        assert asyncio.run(answers(llm)) == wanted, "with the one that came back"
        session = hub.launcher.session
    gc.collect()
    assert alive(pids) == []
    assert all(now <= then for now, then in zip(memories([os.getpid()]), before))
    assert not session.exists()
    assert list(Path(tempfile.gettempdir()).glob(f"hydrainfer-{os.getpid()}-*")) == []


def leases(stats):
    return sum(leased for _, leased, _ in stats.cache_blocks.values())

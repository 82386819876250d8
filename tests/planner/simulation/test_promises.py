"""What a placer promises of a conversation is found there, whatever kinds of cache the model has."""

from functools import lru_cache

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hydrainfer.core import Layout
from hydrainfer.planner.costs import blocks_of, cost_of
from hydrainfer.planner.costs.hardware import read_hardware
from hydrainfer.planner.inputs import shape_of
from hydrainfer.planner.nouns import ANSWER, PromptPart, TraceRequest
from hydrainfer.planner.simulation import Simulator, as_requests
from hydrainfer.planner.simulation.simulator import InstanceModel
from hydrainfer.scheduler import Budgets

pytestmark = pytest.mark.cpu
BLOCK = 16
LAYOUTS = ("2EPD", "1E2P1D")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
TURNS = 6
MODELS = ("gemma-3-4b", "qwen3.5-9b", "mimo-v2-flash", "gpt-oss-20b", "windows", "llama-3.1-8b")
ROOMY = msgspec.structs.replace(read_hardware("h800"), memory_bytes=2e12, flops_per_s=5e12)
"""A device with room for all, so slow that fetching any number of tokens takes less time than computing them."""


@lru_cache
def model(name):
    """A model's shape and costs. "windows": every layer has one, as in Mistral 7B."""
    shape = shape_of("llama-3.1-8b" if name == "windows" else name)
    if name == "windows":
        shape = msgspec.structs.replace(shape, windows=(4096,) * shape.layers)
    return shape, cost_of(shape, ROOMY)


def deployment(name, layout):
    """Instances with room for everything."""
    shape, cost = model(name)
    for n, role in enumerate(Layout.parse(layout).instances):
        blocks = {spec: min(most, 20_000) for spec, most in blocks_of(shape, ROOMY, role).items()}
        yield InstanceModel(name=f"{role}{n}", role=role, cost=cost, blocks=blocks, budgets=Budgets(tokens=512))


class Promises(Simulator):
    """Records, by request, the tokens that the chosen instances were said to have, and those that were found."""

    def __init__(self, instances):
        super().__init__(instances)
        self.promised, self.found = {}, {}
        for placer in (self._placer, *(node.placer for node in self.nodes.values())):
            placer.choose = self._watched(placer.roster, placer.choose)

    def _watched(self, roster, choose):
        def chosen(request, stage, exclude):
            name = choose(request, stage, exclude)
            promise = roster.locator.locate(request).get(name, 0)
            self.promised[request.id] = max(promise, self.promised.get(request.id, 0))
            return name

        return chosen

    def hear(self, outputs):
        super().hear(outputs)
        for o in outputs:
            self.found[o.request_id] = max(o.n_cached, self.found.get(o.request_id, 0))


conversations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ""]),  # the system prompt
        st.integers(0, 700),  # its tokens
        st.lists(st.tuples(st.integers(1, 900), st.integers(1, 120)), min_size=TURNS, max_size=TURNS),
        st.booleans(),  # whether it is about a picture
    ),
    min_size=1,
    max_size=3,
)


def trace_of(drawn, sees, apart_s):
    """The turns of all conversations in turn."""
    parts = [()] * len(drawn)
    for i, (system, n_system, _, pictured) in enumerate(drawn):
        parts[i] = (PromptPart(system, n_system),) if system and n_system else ()
        if sees and pictured:
            parts[i] = (*parts[i], PromptPart(f"picture {i}", 256, True))
    for turn in range(TURNS):
        for i, (*_, turns, _) in enumerate(drawn):
            n_text, n_output = turns[turn]
            parts[i] = (*parts[i], PromptPart(f"text {i} {turn}", n_text))
            pictures = tuple(part.n_tokens for part in parts[i] if part.picture)
            n_prompt = sum(part.n_tokens for part in parts[i])
            yield TraceRequest(
                arrival_s=apart_s * (turn * len(drawn) + i),
                n_text=n_prompt - sum(pictures),
                pictures=pictures,
                n_output=n_output,
                parts=parts[i],
                whole=True,
            )
            parts[i] = (*parts[i], PromptPart(ANSWER, n_output))


def served(name, layout, drawn, apart_s):
    """The requests of the conversations, and the simulator that has served them."""
    requests = as_requests(trace_of(drawn, model(name)[0].vision is not None, apart_s), BLOCK)
    simulator = Promises(list(deployment(name, layout)))
    simulator.run(requests)
    return requests, simulator


def cached(name, layout, drawn):
    """The tokens found of each prompt, if no request waits for another."""
    requests, simulator = served(name, layout, drawn, 30.0)
    assert simulator.found == simulator.promised, layout
    return [simulator.found[r.id] for r in requests]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None, phases=NO_SHRINKING)
@given(drawn=conversations)
def test_with_room_for_everything_what_is_promised_is_found_as_on_one_instance(name, drawn):
    """But for first turns: conversations with the same system prompt may begin at different instances."""
    alone = cached(name, "1EPD", drawn)[len(drawn) :]
    for layout in LAYOUTS:
        several = cached(name, layout, drawn)[len(drawn) :]
        assert all(abs(a - b) <= BLOCK for a, b in zip(alone, several, strict=True)), (layout, alone, several)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None, phases=NO_SHRINKING)
@given(drawn=conversations, apart_s=st.sampled_from([0.05, 0.5, 2.0]))
def test_nothing_promised_is_taken_back_while_many_run(name, drawn, apart_s):
    for layout in LAYOUTS:
        _, simulator = served(name, layout, drawn, apart_s)
        assert all(simulator.found[i] >= promise for i, promise in simulator.promised.items()), layout

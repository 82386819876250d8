"""Every model of configs/models that sees, in the simulator and on emulated devices: the same batches, migrations and
tokens."""

from itertools import accumulate

import msgspec
import pytest

from hydrainfer.checkpoint import locate_model
from hydrainfer.config.shipped import shipped
from hydrainfer.core import Layout, MediaSpan, Request, SamplingParams, chain_of, chain_root
from hydrainfer.families import read_config
from hydrainfer.planner.costs import blocks_of, cost_of, read_hardware
from hydrainfer.planner.inputs import shape_of
from hydrainfer.planner.simulation.simulator import InstanceModel
from hydrainfer.processor import Counting, image_adapter
from hydrainfer.scheduler import Budgets
from tests.planner.simulation.test_schedule_equality import check_equal
from tests.scheduler.fakes import shown_ids

pytestmark = pytest.mark.cpu
SEEING = [
    path.parent.name
    for path in sorted(shipped("configs").glob("models/*/config.json"))
    if "vision_config" in msgspec.json.decode(path.read_bytes())
]
BLOCK = 16
ROOMY = msgspec.structs.replace(read_hardware("h800"), memory_bytes=2e12)
MOST_BLOCKS = {True: 600, False: 16}  # of paged caches, and states
PROMPTS = (((640, 480),), ((448, 448), (200, 900)), ((640, 480),), ())
"""The pictures of each prompt, by width and height. The third prompt shows the first one's."""


def request(model, n, sizes):
    """A request with these pictures, as many tokens as the model's rules say, in each the texts that stand inside."""
    adapter = image_adapter(model)
    if isinstance(adapter, Counting):
        adapter = adapter.among(len(sizes))
    media, ids = [], [1]
    for width, height in sizes:
        item = adapter.fit(width, height)
        inner = sorted((after, text.n_tokens) for text in item.inner for after in text.after)
        gaps = tuple(zip([after for after, _ in inner], accumulate(n_tokens for _, n_tokens in inner)))
        name = f"{width} x {height}"
        media.append(MediaSpan(len(ids), item.n_tokens, name.encode(), name, whole=item.whole, gaps=gaps))
        ids += shown_ids(media[-1])
    ids += range(100, 120 + 9 * n)
    return Request(
        id=f"r{n}",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None),
        max_tokens=6 + 5 * n,
        seed=n,
        media=tuple(media),
        arrival_s=0.02 * n,
        keys=chain_of(chain_root(b"shown"), ids, BLOCK, media),
    )


def instances_of(name, layout):
    """Instances with the model's costs and kinds of caches. Keys, values and embeddings are narrow: their bytes are
    copied."""
    shape = shape_of(name)
    narrow = {"hidden": 8, "kv_heads": 1, "local_kv_heads": 0, "head_dim": 2, "local_head_dim": 0, "value_dim": 0}
    cost, small = cost_of(shape, ROOMY), msgspec.structs.replace(shape, **narrow)
    for n, role in enumerate(Layout.parse(layout).instances):
        blocks = {spec: min(most, MOST_BLOCKS[spec.paged]) for spec, most in blocks_of(small, ROOMY, role).items()}
        yield InstanceModel(name=f"{role}{n}", role=role, cost=cost, blocks=blocks, budgets=Budgets(tokens=512))


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("name", SEEING)
def test_pictures_are_served_alike_by_the_simulator_and_by_emulated_devices(name, layout):
    model = read_config(locate_model(name))
    requests = [request(model, n, sizes) for n, sizes in enumerate(PROMPTS)]
    real, _ = check_equal(list(instances_of(name, layout)), requests, range(10, 90), n_least=20)
    assert {r.id: len(real.tokens[r.id]) for r in requests} == {r.id: r.max_tokens for r in requests}

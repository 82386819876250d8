"""One EPD instance on a CUDA device against transformers: both lanes on their streams. Not yet run on a GPU."""

from __future__ import annotations

import pytest

from tests.parts import parts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from tests.checkpoints import make_llava
    from tests.equivalence.reference import Reference
    from tests.equivalence.test_one_instance import CHATS, IN_ORDER, N_NEW

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    path = make_llava(tmp_path_factory.mktemp("llava"), 0, heads=4, kv_heads=2, head_dim=16)
    (path / "chat_template.jinja").write_text(IN_ORDER)
    reference = Reference(path)
    return path, {name: reference.greedy(chat, N_NEW) for name, chat in CHATS.items()}


@pytest.mark.parametrize("overlap", ["free", "step", "off"])
@pytest.mark.parametrize("token_budget", [7, 1024])
def test_greedy_ids_equal_the_reference(case, overlap, token_budget):
    from hydrainfer import LLM, SamplingParams
    from tests.equivalence.criterion import Tally
    from tests.equivalence.test_one_instance import CHATS, N_NEW, check_whole, compare

    path, wanted = case
    tally = Tally()
    with LLM(path, device="cuda", dtype="float32", overlap=overlap, token_budget=token_budget) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
        for label in ("cold", "cached"):
            compare(llm.chat(list(CHATS.values()), greedy, use_tqdm=False), wanted, label, tally)
        check_whole(parts(llm))
    tally.check()

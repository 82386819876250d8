"""Without any option, greedy tokens are those of transformers where it uses its torchvision image processors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hydrainfer import LLM, SamplingParams
from tests.checkpoints import make_llava
from tests.checkpoints_qwen import make_qwen
from tests.equivalence.criterion import Tally
from tests.equivalence.torchvision_reference import N_NEW
from tests.families.chats import IN_ORDER, PICTURES

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "torchvision"
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW, logprobs=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    llava = make_llava(tmp_path_factory.mktemp("llava"), seed=4)
    (llava / "chat_template.json").unlink()  # which would come first
    (llava / "chat_template.jinja").write_text(IN_ORDER)
    return {"llava": llava, "qwen2_vl": make_qwen("qwen2_vl", tmp_path_factory.mktemp("qwen"), 1)}


@pytest.fixture(scope="module")
def wanted(paths, tmp_path_factory):
    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in .cache/torchvision; make torchvision puts it there")
    folder = tmp_path_factory.mktemp("torchvision")
    checkpoints, results = folder / "checkpoints.json", folder / "results.json"
    checkpoints.write_text(json.dumps({family: str(path) for family, path in paths.items()}))
    command = [sys.executable, "-m", "tests.equivalence.torchvision_reference"]
    subprocess.run([*command, FOLDER, checkpoints, results], check=True, cwd=ROOT)
    return json.loads(results.read_text())


def answers(path, **options):
    with LLM(path, launcher="inproc", threads=1, **options) as llm:
        return llm.chat(list(PICTURES.values()), GREEDY, use_tqdm=False)


def distance(outputs, wanted):
    """The largest difference from the gaps between the two best tokens that transformers has, as far as the answers are
    equal."""
    found = []
    for out, (_, ids, gaps) in zip(outputs, wanted.values(), strict=True):
        answer = out.outputs[0]
        for ours, said, theirs, gap in zip(answer.token_ids, answer.logprobs, ids, gaps, strict=True):
            (_, best), (_, second) = said.top
            found.append(abs(best - second - gap))
            if ours != theirs:
                break
    return max(found)


@pytest.mark.parametrize(("family", "layout"), [("llava", "1EPD"), ("qwen2_vl", "1EPD"), ("qwen2_vl", "1E1P1D")])
def test_tokens_are_those_of_transformers_with_torchvision(family, layout, paths, wanted):
    tally, outputs = Tally(), answers(paths[family], layout=layout)
    for out, (name, (prompt_ids, ids, gaps)) in zip(outputs, wanted[family].items(), strict=True):
        assert list(out.prompt_token_ids) == prompt_ids, name
        tally.add(f"{family}/{layout}/{name}", list(out.outputs[0].token_ids), ids, gaps)
    tally.check()
    assert distance(outputs, wanted[family]) < 1e-4


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_pillows_pixels_give_other_logits(family, paths, wanted):
    """Else the equality would say little."""
    assert distance(answers(paths[family], image_backend="pillow"), wanted[family]) > 1e-3

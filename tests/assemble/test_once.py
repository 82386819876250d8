"""What a start reads of a checkpoint it reads once, however many instances there are."""

import pytest

from hydrainfer.assemble import start_instance
from hydrainfer.config import ServeConfig
from tests.checkpoints import make_llava

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_the_configuration_is_parsed_once(tmp_path, monkeypatch, layout):
    from transformers import AutoConfig

    parse, parsed = AutoConfig.from_pretrained, []

    def counting(path, *args, **kwargs):
        parsed.append(path)
        return parse(path, *args, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", counting)
    config = ServeConfig(model=str(make_llava(tmp_path)), layout=layout, launcher="inproc", media_workers=0)
    start_instance(config).close()
    assert len(parsed) == 1

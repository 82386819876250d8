"""The options about URLs, from their text to what the fetcher is given."""

import pytest

from hydrainfer.assemble.media import check_backends, fetch_limits, media_limits
from hydrainfer.config import load
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.cpu


def test_defaults_let_nothing_private_through():
    limits = fetch_limits(load({"model": "x"}).config)
    assert (limits.hosts, limits.domains, limits.roots) == ("public", (), ())
    assert (limits.image_s, limits.max_image_bytes) == (5.0, 32 << 20)


def test_lists_are_separated_by_commas(tmp_path):
    given = {"media_domains": "A.example, *.b.example,", "media_roots": f"{tmp_path},/", "max_image_mib": "0.5"}
    config = load({"model": "x", **given}).config
    limits = fetch_limits(config)
    assert limits.domains == ("a.example", "*.b.example") and list(map(str, limits.roots)) == [str(tmp_path), "/"]
    assert limits.max_image_bytes == media_limits(config).max_image_bytes == 1 << 19


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"media_hosts": "all"}, "public, any, none"),
        ({"media_domains": "https://a.example"}, "no host name"),
        ({"media_domains": "a.*"}, "no host name"),
        ({"media_roots": "/no/such/directory"}, "no directory"),
        ({"image_fetch_s": 0}, "image_fetch_s"),
    ],
)
def test_wrong_options_are_said_at_start(given, says):
    with pytest.raises(ConfigError, match=says):
        fetch_limits(load({"model": "x", **given}).config)


@pytest.mark.parametrize(
    ("option", "backend", "extra"), [("image_backend", "dali", "dali"), ("video_backend", "decord", "video")]
)
def test_decoders_that_are_not_installed_are_said_at_start(option, backend, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load({"model": "x", option: backend}).config
    with pytest.raises(ConfigError) as raised:
        check_backends(config)
    assert str(raised.value) == f"{backend} is not installed: pip install 'hydrainfer[{extra}]'"
    check_backends(load({"model": "x"}).config)

import pytest

from hydrainfer import builtin
from hydrainfer.config import ENV_PREFIX, load, options
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.unit


def test_flags_beat_environment_beats_yaml_beats_defaults(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: from-yaml\nport: 1\ntoken_budget: 7\nimage_budget: 3\n")
    env = {ENV_PREFIX + "PORT": "2", ENV_PREFIX + "TOKEN_BUDGET": "8", "OTHER": "x"}
    config, provenance = load({"port": 3}, path, env)
    assert (config.model, config.port, config.token_budget, config.image_budget) == ("from-yaml", 3, 8, 3)
    assert provenance["port"] == "flag"
    assert provenance["token_budget"] == "HYDRAINFER_TOKEN_BUDGET"
    assert provenance["image_budget"] == str(path)
    assert provenance["dtype"] == "default"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"modle": "x"}, "unknown option 'modle'.*did you mean model"),
        ({"model": "x", "port": 70000}, "port .flag.: expected `int` <= 65535, got 70000"),
        ({"model": "x", "device": "tpu"}, "must be one of auto, cpu, cuda, emulated, got 'tpu'"),
        ({"model": "x", "token_budget": "many"}, "token_budget .flag.*got 'many'"),
        ({"model": "x", "api_key": ""}, "api_key .flag.*length >= 1"),  # `--api-key "$UNSET"` must not open the server
        ({"model": "x", "kv_cache_gib": "inf"}, "kv_cache_gib .flag.: must be finite"),
    ],
)
def test_a_wrong_option_names_source_key_and_rule(flags, message):
    with pytest.raises(ConfigError, match=message):
        load(flags)


def test_the_built_in_model_serves_those_who_name_none():
    config, provenance = load({}, None, {})
    assert config.model == str(builtin.MODEL)
    assert provenance["model"] == "built-in"
    assert load({}, None, {ENV_PREFIX + "MODEL": "x"}).provenance["model"] == ENV_PREFIX + "MODEL"


def test_auto_is_a_key_like_any_other():
    assert load({"model": "x", "api_key": "auto", "dtype": "auto", "threads": "auto"}).config.api_key == "auto"


@pytest.mark.parametrize(("content", "message"), [("[1, 2]", "keys and values"), ("a: [", "not valid YAML")])
def test_a_broken_file_is_named(tmp_path, content, message):
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load({}, path)
    with pytest.raises(ConfigError, match="cannot read"):
        load({}, tmp_path / "none.yaml")


def test_auto_is_the_absence_of_a_value():
    assert load({"model": "m", "kv_cache_gib": "auto"}).config.kv_cache_gib is None


@pytest.mark.parametrize(
    "given",
    [{"kv_cache_gib": "0.5"}, {"image_cache_gib": 1}, {"threads": "2"}, {"max_model_len": 64}, {"api_key": "k"}],
)
def test_optional_options_take_values(given):
    config = load({"model": "m", **given}).config
    assert all(type(v)(getattr(config, k)) == v for k, v in given.items())


def test_optional_options_have_bounds():
    for name in ("kv_cache_gib", "threads", "max_model_len"):
        with pytest.raises(ConfigError, match=name):
            load({"model": "m", name: 0})


def test_every_option_says_what_it_is_for():
    assert all(o.help.endswith(".") and o.group for o in options())

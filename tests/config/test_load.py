import pytest

from hydrainfer import builtin
from hydrainfer.config import ENV_PREFIX, config_table, load, options
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.unit


def test_flags_beat_environment_beats_yaml_beats_defaults(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: from-yaml\nport: 1\ntoken_budget: 7\nimage_budget: 3\n")
    env = {ENV_PREFIX + "PORT": "2", ENV_PREFIX + "TOKEN_BUDGET": "8", "OTHER": "x"}
    config, provenance, _ = load({"port": 3}, path, env)
    assert (config.model, config.port, config.token_budget, config.image_budget) == ("from-yaml", 3, 8, 3)
    assert provenance["port"] == "flag"
    assert provenance["token_budget"] == "HYDRAINFER_TOKEN_BUDGET"
    assert provenance["image_budget"] == str(path)
    assert provenance["dtype"] == "default"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"modle": "x"}, "unknown option 'modle'.*did you mean model"),
        ({"tensor_paralel_size": 2}, r"did you mean tensor_parallel_size\?"),
        ({"zzzz": 2}, "unknown option 'zzzz' .flag.; `hydrainfer serve --help` lists"),
        ({"model": "x", "port": 70000}, "port .flag.: must be a whole number up to 65535, got 70000"),
        ({"model": "x", "device": "tpu"}, "must be one of auto, cpu, cuda, emulated, got 'tpu'"),
        (
            {"model": "x", "token_budget": "many"},
            "token_budget .flag.: must be auto or a whole number of at least 1, got 'many'",
        ),
        ({"model": "x", "drain_s": "long"}, "drain_s .flag.: must be a number, got 'long'"),
        ({"model": "x", "kv_cache_gib": "inf"}, "kv_cache_gib .flag.: must be finite"),
    ],
)
def test_a_wrong_option_names_source_key_and_rule(flags, message):
    with pytest.raises(ConfigError, match=message):
        load(flags)


def test_the_table_at_start_lists_what_was_found_in_order():
    names = [f"fact_{i}" for i in range(9)]
    table = config_table(load({"model": "x"}), dict.fromkeys(names, 1))
    assert list(table.columns[0].cells)[-9:] == names


def service(name, host="10.0.0.1", protocol="tcp", port_name="_HTTP"):
    """What a kubelet puts into every container of the namespace for a service of that name."""
    at, link = f"[{host}]" if ":" in host else host, f"{name}_PORT_8000_{protocol.upper()}"
    url = f"{protocol}://{at}:8000"
    return {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT{port_name}": "8000",
        f"{name}_PORT": url,
        link: url,
        f"{link}_PROTO": protocol,
        f"{link}_PORT": "8000",
        f"{link}_ADDR": host,
    }


@pytest.mark.parametrize(
    "variables",
    [
        service("HYDRAINFER"),
        service("HYDRAINFER", host="fd00::1", port_name="_GRPC_WEB_2"),
        service("HYDRAINFER_HTTP_API", protocol="udp"),
        service("HYDRAINFER_2", protocol="sctp"),
    ],
)
def test_the_variables_of_a_kubernetes_service_are_not_options(variables):
    alone = load({}, None, {})
    assert load({}, None, variables) == alone
    for name, text in variables.items():
        assert load({}, None, {name: text}) == alone, name
    beside = load({}, None, {**variables, "HYDRAINFER_TOKEN_BUDGET": "9", "HYDRAINFER_PORT": "9000"})
    assert (beside.config.token_budget, beside.config.port) == (9, 9000)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HYDRAINFER_PROT", "1", "unknown option 'prot' .HYDRAINFER_PROT.; did you mean port"),
        ("HYDRAINFER_PORT", "high", "port .HYDRAINFER_PORT."),
        ("HYDRAINFER_PORT", "http://10.0.0.1:8000", "port .HYDRAINFER_PORT."),
        ("HYDRAINFER_PROT", "tcp://10.0.0.1:8000", "unknown option"),
        ("HYDRAINFER_API_PORT", "8000", "unknown option"),
        ("HYDRAINFER_PORT_HTTP", "tcp://10.0.0.1:8000", "unknown option"),
        ("HYDRAINFER_PORT_8000_TCP", "8000", "unknown option"),
        ("HYDRAINFER_PORT_8000_TCP_HOST", "10.0.0.1", "unknown option"),
        ("HYDRAINFER_SERVICE_NAME", "x", "unknown option"),
        ("HYDRAINFER_SERVICE_HOST", "example.org", "unknown option"),
        ("HYDRAINFER_SERVICE_PORT", "high", "unknown option"),
    ],
)
def test_nothing_else_in_the_environment_is_passed_over(name, text, message):
    with pytest.raises(ConfigError, match=message):
        load({}, None, {name: text})


def test_user_and_password_of_a_store_are_no_options():
    variables = {"HYDRAINFER_STORE_PASSWORD": "s3cret", "HYDRAINFER_STORE_USERNAME": "me"}
    assert load({}, None, variables) == load({}, None, {})
    assert load({}, None, {**variables, "HYDRAINFER_STORE": "dir:/x"}).config.store == "dir:/x"
    with pytest.raises(ConfigError, match="unknown option 'store_passwort'"):
        load({}, None, {"HYDRAINFER_STORE_PASSWORT": "s3cret"})


def test_a_store_that_is_no_text_is_not_shown(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("store: ['redis://me:s3cret@host']\n")
    with pytest.raises(ConfigError) as e:
        load({}, path)
    assert e.value.message == f"store ({path}): must be text, got list"


def test_no_option_is_mistaken_for_a_service():
    assert [o.name for o in options() if "service" in o.name or "port_" in o.name or o.name.endswith("_port")] == []


def test_the_built_in_model_serves_those_who_name_none():
    config, provenance, _ = load({}, None, {})
    assert config.model == builtin.NAME
    assert provenance["model"] == "built-in"
    assert load({}, None, {ENV_PREFIX + "MODEL": "x"}).provenance["model"] == ENV_PREFIX + "MODEL"


@pytest.mark.parametrize("name", ["api_key", "tenants", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "media_domains"])
def test_an_unset_shell_variable_opens_nothing(name, tmp_path):
    """`--api-key "$UNSET"` must not let everybody in."""
    (tmp_path / "serve.yaml").write_text(f"{name}: ''\n")
    for given in ({"flags": {name: ""}}, {"flags": {}, "environ": {ENV_PREFIX + name.upper(): ""}}):
        with pytest.raises(ConfigError, match=f"{name} .*: must be text that is not empty, got ''"):
            load(**given)
    with pytest.raises(ConfigError, match="must be text that is not empty"):
        load({}, tmp_path / "serve.yaml")
    assert getattr(load({name: "auto", "dtype": "auto", "threads": "auto"}).config, name) == "auto"


def test_an_empty_host_is_not_every_interface():
    for given in ({"flags": {"host": ""}}, {"flags": {}, "environ": {ENV_PREFIX + "HOST": ""}}):
        with pytest.raises(ConfigError, match=r"host .*: must be text that is not empty, got ''"):
            load(**given)


@pytest.mark.parametrize(("key", "kind"), [("123456789012", "a whole number"), ("[123456789012]", "list")])
def test_a_key_that_is_no_text_is_not_shown(tmp_path, key, kind):
    path = tmp_path / "serve.yaml"
    path.write_text(f"api_key: {key}\n")
    with pytest.raises(ConfigError) as e:
        load({}, path)
    assert e.value.message == f"api_key ({path}): must be text, got {kind}"


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

"""Every field, parameter and error is described, and every example is one that the server takes."""

import pytest

from hydrainfer.processor import load_description
from hydrainfer.server.protocols import PROTOCOLS
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest
from tests.server.tool_templates import HERMES

pytestmark = pytest.mark.cpu
BODIES = {path: body for protocol in PROTOCOLS for path, body in protocol.bodies.items()}
FIELDS = [
    (path, name, example)
    for path, body in BODIES.items()
    for name, about in body.fields.model_fields.items()
    for example in about.examples
]
NEEDS = {
    "stream_options": {"stream": True},
    "progress": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
"""What else a request must have."""


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("described"), image_size=56, context=2048)
    server = ServerUnderTest(load_description(path, chat_template=HERMES))
    yield server
    server.close()


def request_of(path, name, example):
    """The body of the path's example with one field more."""
    body = {**BODIES[path].example, name: example}
    needed = NEEDS.get(name, {})
    if name == "tool_choice":
        needed = {"tools": BODIES[path].fields.model_fields["tools"].examples[0]}
    if name == "messages":
        body.pop("prompt", None)  # of /tokenize, which takes one of them
    if name in ("model", "name"):
        body[name] = "tiny"
    return {**body, **needed}


@pytest.mark.parametrize(("path", "name", "example"), FIELDS)
def test_every_example_is_accepted(described, path, name, example):
    response = described.post(path, **request_of(path, name, example))
    assert response.status_code == 200 and '"error":{' not in response.text, response.text


@pytest.mark.parametrize("path", BODIES)
def test_every_example_of_a_body_is_answered(described, path):
    assert described.post(path, **BODIES[path].example).status_code == 200


def test_every_field_has_a_sentence_a_default_and_an_example(described):
    schemas = described.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"ChatFields", "MessageFields", "ResponseFields.Item", "OllamaChatFields.OptionFields"} <= schemas.keys()
    for title, schema in schemas.items():
        for name, field in schema["properties"].items():
            where = f"{title}.{name}"
            assert field["description"].endswith(".") and field["examples"], where
            assert name in schema.get("required", ()) or "default" in field, where
            if field.get("default", 0) is None:
                assert field["x-unset"], f"what {where} is if it is not sent"


def test_defaults_and_examples_are_within_the_bounds(described):
    for schema in described.http.get("/openapi.json").json()["components"]["schemas"].values():
        for name, field in schema["properties"].items():
            numbers = [x for x in (field.get("default"), *field["examples"]) if isinstance(x, int | float)]
            assert all(x >= field.get("minimum", x) and x <= field.get("maximum", x) for x in numbers), name
            assert all(x in field.get("enum", [x]) for x in field["examples"]), name


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for path in ("/v1/chat/completions", "/v1/completions") for name in BODIES[path].fields.model_fields],
)
def test_values_beyond_the_bounds_are_refused(described, name, path):
    field = BODIES[path].fields.model_json_schema()["properties"][name]
    beyond = [field[side] + step for side, step in (("minimum", -3), ("maximum", 3)) if side in field]
    for value in beyond:
        refused = described.post(path, **request_of(path, name, value))
        assert refused.status_code == 400, (value, refused.text)
        assert name.removeprefix("max_completion_") in refused.text


def test_every_operation_says_what_it_does_and_which_errors_it_has(described):
    made = described.http.get("/openapi.json").json()
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and operation["description"].endswith("."), path
            for parameter in operation.get("parameters", ()):
                assert parameter["description"].endswith(".") and parameter["schema"]["examples"], path
            if method == "post" and path != "/reset_prefix_cache":
                assert operation["requestBody"]["content"]["application/json"]["example"] == BODIES[path].example
                assert {"400", "401", "404", "413", "415", "429"} <= operation["responses"].keys(), path
            assert all(answer["description"].endswith(".") for answer in operation["responses"].values())
    assert {"500", "503", "504"} <= made["paths"]["/api/chat"]["post"]["responses"].keys()
    assert made["paths"]["/health"]["get"]["responses"].keys() == {"200", "503"}

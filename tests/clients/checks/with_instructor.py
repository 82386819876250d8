"""instructor: a typed answer in each of its modes."""

import instructor
import openai
from common import CALLS, KEY, Seen, run

ASK = [{"role": "user", "content": "Look."}]


def answered(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=CALLS, api_key=KEY), mode=mode)
    return client.chat.completions.create(
        model="tools", messages=ASK, response_model=Seen, max_retries=0, max_tokens=200, temperature=0
    )


def tools_mode():
    assert isinstance(answered(instructor.Mode.TOOLS), Seen)


def json_schema_mode():
    assert isinstance(answered(instructor.Mode.JSON_SCHEMA), Seen)


def iterable_of_partial_answers():
    client = instructor.from_openai(openai.OpenAI(base_url=CALLS, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model="tools", messages=ASK, response_model=Seen, max_retries=0, max_tokens=200, temperature=0
        )
    )
    assert parts[-1].color and parts[-1].count is not None


if __name__ == "__main__":
    run(tools_mode, json_schema_mode, iterable_of_partial_answers)

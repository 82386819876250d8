"""Lists of possible answers as grammars in the Lark syntax of llguidance."""

from __future__ import annotations

import json


def choice_rules(name: str, choices: str) -> list[str]:
    """The Lark rules of one of `choices`, a JSON list of texts. The first rule is called `name`. Raises `ValueError` if
    `choices` is not JSON.

    All texts are in one terminal, which the library turns into an automaton. As alternatives of a rule, each would
    count as an item of the parser's first row, of which there may be `max_items_in_row`."""
    terminal = name.upper()
    texts = " | ".join(json.dumps(text) for text in json.loads(choices))
    return [f"{name}: {terminal}", f"{terminal}: {texts}"]

"""Random small JSON schemas whose instances are short."""

from __future__ import annotations

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice([*kinds, *(["array", "object", "object", "anyOf"] if depth else [])])
    match kind:
        case "string":
            return {"type": "string", "minLength": (n := rng.randrange(3)), "maxLength": n + rng.randrange(6)}
        case "integer":
            return {"type": "integer", "minimum": (n := rng.randrange(-50, 50)), "maximum": n + rng.randrange(1000)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample(["red", 'a "quoted" one', 7, -1.5, None, True, "é😀"], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice(["x/y", 0, [1, 2], {"k": "v"}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(foo|bar)-[0-9]{2}$", "^$"])}
        case "array":
            low = rng.randrange(2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    names = rng.sample(["a", "name", "a key", "ключ", 'q"', "b1", "é"], rng.randrange(4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }

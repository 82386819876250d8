"""The families of models that are served. A file describes one family: its architectures, decoder, vision tower, and
the names of its tensors. `table` finds them, and reads a checkpoint directory by them.

Called by models, processor, planner and assemble. Never imports torch; importing all of it takes milliseconds.
"""

from hydrainfer.families.table import (
    FAMILIES,
    NOT_SERVED,
    SERVED,
    ParsedConfig,
    architecture_of,
    family_of,
    parse_config,
    read_config,
)

__all__ = [
    "FAMILIES",
    "NOT_SERVED",
    "SERVED",
    "ParsedConfig",
    "architecture_of",
    "family_of",
    "parse_config",
    "read_config",
]

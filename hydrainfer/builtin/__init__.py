"""The checkpoint that ships with the package, for those who name none: it knows shapes and digits.

Called by the configuration loader, `checkpoint.locate` and the demo. An ordinary Hugging Face directory beside this
file; made by `training/builtin`. Nothing anywhere treats it in a special way, but that it has a name.
"""

from pathlib import Path

NAME = "builtin"
MODEL = Path(__file__).parent / "shapes-and-digits"
PICTURE = Path(__file__).parent / "sample.png"

__all__ = ["MODEL", "NAME", "PICTURE"]

"""The checkpoint that ships with the package, used if no model is named: it recognizes shapes and digits.

Called by the configuration loader, `checkpoint.locate` and the demo. An ordinary Hugging Face directory beside this
file; made by `training/builtin`. Apart from its name, it is treated like any other checkpoint.
"""

from pathlib import Path

NAME = "builtin"
MODEL = Path(__file__).parent / "shapes-and-digits"
PICTURE = Path(__file__).parent / "sample.png"

__all__ = ["MODEL", "NAME", "PICTURE"]

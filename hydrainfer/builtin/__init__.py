"""The checkpoint that ships with the package, for those who name none: it knows shapes and digits.

Called by the configuration loader and the demo. An ordinary Hugging Face directory beside this file; made by
`training/builtin`. Nothing anywhere treats it in a special way.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "shapes-and-digits"
PICTURE = Path(__file__).parent / "sample.png"

__all__ = ["MODEL", "PICTURE"]

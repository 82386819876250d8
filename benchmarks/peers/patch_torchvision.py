"""Makes the CUDA build of torchvision importable beside the CPU build of torch.

`torchvision._C` links libtorch_cuda and so does not load; then `register_fake("torchvision::nms")` fails because the
operator has no schema. Declaring two schemas is enough: the transforms that image processors use are pure Python.
Run with the peer environment's python; a second run changes nothing.
"""

import pathlib
import sysconfig

MARK = "# PEERS-PATCH"
ANCHOR = "import torchvision.extension  # noqa: F401\n"
DECLARE = f"""
{MARK}
if not torchvision.extension._has_ops():
    _peers_lib = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _peers_lib.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

path = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torchvision" / "_meta_registrations.py"
source = path.read_text()
if MARK not in source:
    if ANCHOR not in source:
        raise SystemExit(f"{path} is not of the version this patch is for (torchvision 0.28)")
    path.write_text(source.replace(ANCHOR, ANCHOR + DECLARE, 1))

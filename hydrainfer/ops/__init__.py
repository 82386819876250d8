"""Operators by name: a plain-torch reference each, and faster variants chosen once at start and reported.

Called by models. Never holds weights, caches or state of requests; never decides what runs when.
"""

from hydrainfer.ops.alone import alone, settle
from hydrainfer.ops.batch import KV, AttentionBatch, Captured, GridRows, HeadNorms, Segments, starts_of, visible
from hydrainfer.ops.build import build_cuda_kernels, cause, ninja_on_path
from hydrainfer.ops.cuda.flashinfer import WORKSPACE_BYTES
from hydrainfer.ops.cuda.flashinfer_modules import PagedAttention, modules_for
from hydrainfer.ops.cuda.kernels import block_copier
from hydrainfer.ops.memory import rows_in_steps, weights, with_more_rows
from hydrainfer.ops.pinned import packed_bytes, to_device, to_host, upload
from hydrainfer.ops.reference import norm_heads
from hydrainfer.ops.scan import DeltaLayer, ScanBatch, ScanRows
from hydrainfer.ops.select import OPERATORS, computes_sooner, packing, pausing, select_ops, stepping, variants
from hydrainfer.ops.table import OpSet
from hydrainfer.ops.weights import Decode, ExpertWeights, Int8Weight, PlainLayer, Shortlist

__all__ = [
    "KV",
    "OPERATORS",
    "WORKSPACE_BYTES",
    "AttentionBatch",
    "Captured",
    "Decode",
    "DeltaLayer",
    "ExpertWeights",
    "GridRows",
    "HeadNorms",
    "Int8Weight",
    "OpSet",
    "PagedAttention",
    "PlainLayer",
    "ScanBatch",
    "ScanRows",
    "Segments",
    "Shortlist",
    "alone",
    "block_copier",
    "build_cuda_kernels",
    "cause",
    "computes_sooner",
    "modules_for",
    "ninja_on_path",
    "norm_heads",
    "packed_bytes",
    "packing",
    "pausing",
    "rows_in_steps",
    "select_ops",
    "settle",
    "starts_of",
    "stepping",
    "to_device",
    "to_host",
    "upload",
    "variants",
    "visible",
    "weights",
    "with_more_rows",
]

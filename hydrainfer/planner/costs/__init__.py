"""Batch times and cache sizes of described or measured devices.

Called by `search` and `inputs`, and by `assemble`, which measures. Never runs a batch, simulated or real.
"""

from hydrainfer.planner.costs.attention import Grouped, Latent
from hydrainfer.planner.costs.costfile import (
    BatchShape,
    BatchTime,
    Copies,
    CostFile,
    link_of,
    read_cost_file,
    write_cost_file,
)
from hydrainfer.planner.costs.decoder import DecoderShape, decoder_of
from hydrainfer.planner.costs.engine import EngineModel, read_engine, slowed, with_steps
from hydrainfer.planner.costs.fitting import fit_cost
from hydrainfer.planner.costs.hardware import Hardware, read_hardware
from hydrainfer.planner.costs.shape import WEIGHT_BYTES, ModelShape, blocks_of, cost_of

__all__ = [
    "WEIGHT_BYTES",
    "BatchShape",
    "BatchTime",
    "Copies",
    "CostFile",
    "DecoderShape",
    "EngineModel",
    "Grouped",
    "Hardware",
    "Latent",
    "ModelShape",
    "blocks_of",
    "cost_of",
    "decoder_of",
    "fit_cost",
    "link_of",
    "read_cost_file",
    "read_engine",
    "read_hardware",
    "slowed",
    "with_steps",
    "write_cost_file",
]

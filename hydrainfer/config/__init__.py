"""Frozen configuration schemas and their loader (defaults < YAML < environment < flags).

Called by the CLI and the offline API. Never mutates a configuration, and never inspects the machine, except for the
places of files.
"""

from hydrainfer.config.cost import cost_model_of, read_cost_model
from hydrainfer.config.folders import cache_folder, keep, locked
from hydrainfer.config.foreign import Name, Options, Spelling, adopt, gathered
from hydrainfer.config.layout import (
    InstanceSpec,
    MachineShare,
    choose_launcher,
    in_words,
    read_layout,
    settle,
    stores_of,
)
from hydrainfer.config.load import ENV_PREFIX, STORE_PASSWORD, STORE_USERNAME, Loaded, load, options
from hydrainfer.config.read import RENAMED, check_known, converted, locate, read_yaml
from hydrainfer.config.schema import MEASURE_MINUTES, ServeConfig
from hydrainfer.config.slo import Slo, inline_slo, is_slo_part, parse_slo, read_slo
from hydrainfer.config.table import config_rows, config_table
from hydrainfer.config.vllm_names import nearest_of_vllm, of_vllm

__all__ = [
    "ENV_PREFIX",
    "MEASURE_MINUTES",
    "RENAMED",
    "STORE_PASSWORD",
    "STORE_USERNAME",
    "InstanceSpec",
    "Loaded",
    "MachineShare",
    "Name",
    "Options",
    "ServeConfig",
    "Slo",
    "Spelling",
    "adopt",
    "cache_folder",
    "check_known",
    "choose_launcher",
    "config_rows",
    "config_table",
    "converted",
    "cost_model_of",
    "gathered",
    "in_words",
    "inline_slo",
    "is_slo_part",
    "keep",
    "load",
    "locate",
    "locked",
    "nearest_of_vllm",
    "of_vllm",
    "options",
    "parse_slo",
    "read_cost_model",
    "read_layout",
    "read_slo",
    "read_yaml",
    "settle",
    "stores_of",
]

"""The planner's view of models and workloads: the shape of a checkpoint, how it counts tokens, and traces to simulate.

Called by `profiling` and the benchmarks. Reads configurations and files only; never loads weights.
"""

from hydrainfer.planner.inputs.models import prompts_of, shape_of
from hydrainfer.planner.inputs.workloads import PromptRules, summary, trace_of, words_to_tokens

__all__ = [
    "PromptRules",
    "prompts_of",
    "shape_of",
    "summary",
    "trace_of",
    "words_to_tokens",
]

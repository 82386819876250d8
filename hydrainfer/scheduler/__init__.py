"""The choice of what each lane of an instance executes next: admission, budgets, Algorithm 1, preemption.

Called by the engine and, unchanged, by the simulator. Never touches tensors, sockets or the clock.
"""

from hydrainfer.scheduler.asking import Ask
from hydrainfer.scheduler.backlog import backlog
from hydrainfer.scheduler.drafting import DRAFTERS, Guess, Guide
from hydrainfer.scheduler.drafts import Drafting
from hydrainfer.scheduler.order import rank_s
from hydrainfer.scheduler.outcome import Outcome, Turn
from hydrainfer.scheduler.parking import Shift
from hydrainfer.scheduler.policy import ENOUGH_S, RUNNING, STEP_S, Budgets, Policy
from hydrainfer.scheduler.saving import Save, SaveCounts, Touch
from hydrainfer.scheduler.scheduler import Scheduler
from hydrainfer.scheduler.skip import skip
from hydrainfer.scheduler.worth import MANY_ROWS, Worth

__all__ = [
    "DRAFTERS",
    "ENOUGH_S",
    "MANY_ROWS",
    "RUNNING",
    "STEP_S",
    "Ask",
    "Budgets",
    "Drafting",
    "Guess",
    "Guide",
    "Outcome",
    "Policy",
    "Save",
    "SaveCounts",
    "Scheduler",
    "Shift",
    "Touch",
    "Turn",
    "Worth",
    "backlog",
    "rank_s",
    "skip",
]

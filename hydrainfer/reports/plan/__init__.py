"""The report of a plan: the answer in words, the table for the console, files and the page. Called by `profiling`."""

from hydrainfer.reports.plan.files import write_plan
from hydrainfer.reports.plan.page import plan_page
from hydrainfer.reports.plan.tables import conclusions, ranked

__all__ = ["conclusions", "plan_page", "ranked", "write_plan"]

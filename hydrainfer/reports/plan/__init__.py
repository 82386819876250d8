"""The report of a plan: the answer in words, the table for the console, files and the page. Called by `profiling`."""

from hydrainfer.reports.plan.cluster_page import cluster_page
from hydrainfer.reports.plan.clusters import cluster_conclusions, cluster_table
from hydrainfer.reports.plan.files import write_cluster_plan, write_plan
from hydrainfer.reports.plan.page import plan_page
from hydrainfer.reports.plan.tables import conclusions, ranked

__all__ = [
    "cluster_conclusions",
    "cluster_page",
    "cluster_table",
    "conclusions",
    "plan_page",
    "ranked",
    "write_cluster_plan",
    "write_plan",
]

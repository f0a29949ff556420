"""Jobs in, endings out: in this process, in processes of this machine, or on a Ray cluster."""

from joma._jobs.base import (
    Engine,
    InProcess,
    Job,
    JobEnd,
    Progress,
    check_engine,
    open_engine,
    run_jobs,
)

__all__ = [
    "Engine",
    "InProcess",
    "Job",
    "JobEnd",
    "Progress",
    "check_engine",
    "open_engine",
    "run_jobs",
]

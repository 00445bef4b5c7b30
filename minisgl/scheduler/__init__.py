"""Which requests run next, and which pages are whose."""

from minisgl.scheduler.scheduler import Committed, Scheduler, Stats

__all__ = ["Committed", "Scheduler", "Stats"]

"""How a strength changes over training ("Scheduled DropHead", §3.2 and figure 2)."""

from collections.abc import Callable

Schedule = Callable[[float, float, float, float], float]


def constant(progress: float, warmup: float, start: float, end: float) -> float:
    """Stay at `end`."""
    return end


def curriculum(progress: float, warmup: float, start: float, end: float) -> float:
    """Grow from 0 to `end`."""
    return end * progress


def anti_curriculum(progress: float, warmup: float, start: float, end: float) -> float:
    """Fall from `start` to 0."""
    return start * (1 - progress)


def scheduled(progress: float, warmup: float, start: float, end: float) -> float:
    """Fall from `start` to 0 over the learning rate's warmup, then grow to `end` at the last step."""
    if progress < warmup:
        return start * (1 - progress / warmup)
    return end * (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "curriculum": curriculum,
    "anti-curriculum": anti_curriculum,
    "scheduled": scheduled,
}
"""Name → function of progress (0 at the first step, 1 at the last), warmup's share of it, start and end value."""

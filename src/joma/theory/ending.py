"""How a flow ended: at its end of time, or early and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EndingKind(StrEnum):
    """What ended a flow."""

    DONE = "done"  # the whole time span was covered
    BLOW_UP = "blow-up"  # the solution does not exist beyond a finite time
    OVERFLOW = "overflow"  # the state has grown beyond what float64 can square
    NOT_UNIQUE = "not unique"  # samples start on a kink and may go either way
    STUCK = "stuck"  # switches without progress in time
    KINK = "kink"  # the samples on a kink could not be resolved
    DIED = "died"  # all weights of a node reached 0, and with them its gradient
    STEPS = "steps"  # the limit of steps was reached
    INTEGRATOR = "integrator"  # SciPy's stepper stopped


@dataclass(frozen=True)
class Ending:
    """What ended a flow, at which time ``t``, in a sentence that is what ``str`` gives."""

    kind: EndingKind
    t: float
    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def done(self) -> bool:
        """Whether the whole time span was covered."""
        return self.kind is EndingKind.DONE


def done(t: float) -> Ending:
    """The ending of a flow that covered its whole time span, up to ``t``."""
    return Ending(EndingKind.DONE, float(t), "done")

"""The theory of JoMA: integrate, solve and check the paper's dynamics. NumPy and SciPy only, float64."""

from joma.theory.bounce import Bounce, solve_bounce, solve_linear_bounce, solve_softmax_bounce
from joma.theory.cdag import CDAG, CDAGPath
from joma.theory.flows import JointFlow
from joma.theory.folded import FoldedFlow
from joma.theory.hierarchy import HBLT, HBLTSamples
from joma.theory.invariants import Invariant
from joma.theory.setting import Attention, Saliency, Task
from joma.theory.trajectory import Slide, Trajectory
from joma.theory.winner import WinnerTakeAll, winner_take_all

__all__ = [
    "CDAG",
    "HBLT",
    "Attention",
    "Bounce",
    "CDAGPath",
    "FoldedFlow",
    "HBLTSamples",
    "Invariant",
    "JointFlow",
    "Saliency",
    "Slide",
    "Task",
    "Trajectory",
    "WinnerTakeAll",
    "solve_bounce",
    "solve_linear_bounce",
    "solve_softmax_bounce",
    "winner_take_all",
]

"""The theory of JoMA: integrate, solve and check the paper's dynamics. NumPy and SciPy only, float64."""

from joma.theory.flows import FoldedFlow, JointFlow
from joma.theory.invariants import Invariant
from joma.theory.setting import Attention, Saliency, Task
from joma.theory.trajectory import Slide, Trajectory

__all__ = ["Attention", "FoldedFlow", "Invariant", "JointFlow", "Saliency", "Slide", "Task", "Trajectory"]

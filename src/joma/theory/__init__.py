"""The theory of JoMA: integrate, solve and check the paper's dynamics. NumPy and SciPy only, float64."""

from joma._extras import require

require("theory", "joma.theory")

from joma.theory import isotropic
from joma.theory._saliency import saliency
from joma.theory.bounce import Bounce, solve_bounce, solve_linear_bounce, solve_softmax_bounce
from joma.theory.cdag import CDAG, CDAGPath
from joma.theory.embeddings import EmbeddingFlow, EmbeddingPath
from joma.theory.ending import Ending, EndingKind
from joma.theory.final import FinalAttention, final_attention
from joma.theory.flows import JointFlow
from joma.theory.folded import FoldedFlow
from joma.theory.hierarchy import HBLT, HBLTSamples
from joma.theory.invariants import Invariant
from joma.theory.laws import Law, Laws, WeightPair, laws, split_logit_velocity
from joma.theory.optimisers import SGD, Adam, AdamW, SignDescent
from joma.theory.queries import BlockFlow, BlockTrajectory, predicted_logits
from joma.theory.setting import Attention, Saliency, Task
from joma.theory.trajectory import Slide, Trajectory
from joma.theory.winner import WinnerTakeAll, winner_take_all

__all__ = [
    "CDAG",
    "HBLT",
    "SGD",
    "Adam",
    "AdamW",
    "Attention",
    "BlockFlow",
    "BlockTrajectory",
    "Bounce",
    "CDAGPath",
    "EmbeddingFlow",
    "EmbeddingPath",
    "Ending",
    "EndingKind",
    "FinalAttention",
    "FoldedFlow",
    "HBLTSamples",
    "Invariant",
    "JointFlow",
    "Law",
    "Laws",
    "Saliency",
    "SignDescent",
    "Slide",
    "Task",
    "Trajectory",
    "WeightPair",
    "WinnerTakeAll",
    "final_attention",
    "isotropic",
    "laws",
    "predicted_logits",
    "saliency",
    "solve_bounce",
    "solve_linear_bounce",
    "solve_softmax_bounce",
    "split_logit_velocity",
    "winner_take_all",
]

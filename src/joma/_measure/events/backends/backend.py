"""The base of all backends.

A backend states three things:

1.  which calls it recognises: PyTorch functions (`TorchFunctionBackend`), functions of Python
    that no mode sees (`KernelBackend`), or functions that transformers looks up by name
    (`InterfaceBackend`);
2.  what such a call gives: queries, keys and values (`DotProduct`) or scores and probabilities
    (`Scores`), and whether the function itself fixes which axes are samples, heads and tokens;
3.  how the arguments and the output of a call become a candidate for an event.

A candidate is not an event yet. The guard settles axes that the function leaves open, compares a
few rows of softmax(s)·V with the output, and then emits or refuses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from joma._measure.events.axes import Axis, Layout
from joma._measure.events.events import AttentionEvent, BlockInput, Call, DotProduct
from joma._measure.events.guard import AttentionCandidate

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource


@dataclass(frozen=True, eq=False)
class DotProductCall:
    """Tensors and settings of one call of fused attention.

    Attributes:
        query: (B, H, Tq, d). If the backend does not fix its axes, any axes before (Tq, d).
        key: (B, Hk, Tk, d), where Hk divides H.
        value: (B, Hk, Tk, dv).
        output: (B, H, Tq, dv), as the model goes on with it, so after dropout.
        mask: broadcastable to (B, H, Tq, Tk); boolean (True takes part) or additive.
        causal: True if query i sees keys 0 … i only.
        scale: factor of the scores; 1/√d if None.
        softcap: c, if scores s become c·tanh(s/c).
        learned_sinks: logits (H,) of one more key per head, which has no value.
        is_grouped: True if Hk may be smaller than H; None if the sizes decide.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    learned_sinks: Tensor | None = None
    is_grouped: bool | None = None

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of a `DotProduct`."""
        is_grouped = self.is_grouped
        if is_grouped is None:
            is_grouped = self.query.shape[-3] != self.key.shape[-3]
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "output": self.output,
            "mask": self.mask,
            "causal": self.causal,
            "scale": self.scale,
            "softcap": self.softcap,
            "learned_sinks": self.learned_sinks,
            "gqa": is_grouped,
        }


class Backend(ABC):
    """One way in which models compute attention.

    Attributes:
        name: the name that `joma.explain` shows.
        event_kinds: the events that its calls become.
        has_fixed_axes: True if the function takes (B, H, T, d) and nothing else, or says where
            samples, heads and tokens are. If not, the guard looks for evidence.
    """

    name: ClassVar[str]
    event_kinds: ClassVar[tuple[type[AttentionEvent], ...]] = (DotProduct,)
    has_fixed_axes: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def watching(source: EventSource, backends: Sequence[Any]) -> AbstractContextManager[object]:
        """Recognise calls of these backends, all of one kind, within a block."""

    @staticmethod
    def can_measure(
        source: EventSource, kind: type[AttentionEvent], call: Call, *tensors: Tensor
    ) -> bool:
        """Return False if no observer wants such an event, or if these tensors cannot be read."""
        return source.wants(kind, BlockInput) and source.measurable(call, *tensors)

    def candidate(
        self,
        source: EventSource,
        call: Call,
        attention: DotProductCall,
        shapes: tuple[Any, ...],
        name: str | None = None,
    ) -> AttentionCandidate:
        """Return a call of fused attention as a candidate for an event.

        Arguments:
            source: the source of the pass.
            call: the module in which the attention ran.
            attention: its tensors.
            shapes: what the guard's verdict holds for; with other shapes it looks again.
            name: of the backend, if it differs from call to call.
        """
        query = attention.query
        key = attention.key
        candidate = AttentionCandidate(
            DotProduct,
            call,
            source.calls_to(call),
            signature=shapes,
            keys=key,
            values=attention.value,
            fields=attention.event_fields(),
            query_axis=query.dim() - 2,
            backend=name or self.name,
        )
        if self.has_fixed_axes:
            candidate.layout = fixed_layout(query)
        else:
            candidate.read_queries = lambda: query
            candidate.read_keys = lambda _: key
        return candidate


def fixed_layout(tensor: Tensor) -> Layout:
    """Return the layout of a tensor that is certain to be (B, H, Tq, …)."""
    samples, heads = tensor.shape[:2]
    return Layout((Axis(samples, 1), Axis(heads, heads)), query_axis=2)


def first_output(output: Any) -> Tensor:
    """Return the states from the output of a function that may return more (a logsumexp)."""
    states: Tensor = output
    if isinstance(output, (tuple, list)):
        states = output[0]
    return states

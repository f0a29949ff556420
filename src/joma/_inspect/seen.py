"""The observers of the inspection tools: neurons with the attention of their block, and the input of each block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from joma._measure.events.events import (
    AttentionEvent,
    BlockInput,
    Hidden,
    PassBegins,
    PassEnds,
    Place,
)

Rows = Callable[
    [int, Tensor], Tensor
]  # window number, queries (P,) -> attention (P, Tk), the mean over heads
OnNeurons = Callable[
    [int, Tensor, Rows], None
]  # layer, activations (B, T, h), attention of its block


class Neurons:
    """An observer that pairs an MLP's hidden neurons with the attention of its block, for ``on_neurons``."""

    wants = (PassBegins, PassEnds, AttentionEvent, Hidden)

    def __init__(self, on_neurons: OnNeurons) -> None:
        self._on_neurons = on_neurons
        self._attentions: dict[str, AttentionEvent] = {}  # of this pass, by module, the latest last

    def observe(self, event: PassBegins | PassEnds | AttentionEvent | Hidden) -> None:
        """Attention is remembered within a pass."""
        if isinstance(event, AttentionEvent):
            self._attentions.pop(event.call.name, None)
            self._attentions[event.call.name] = event
        elif isinstance(event, Hidden):
            attention = self._of_block(event.call.name)
            self._on_neurons(
                event.layer, event.states, lambda b, at: attention.rows(b, at).mean(dim=0)
            )
        else:
            self._attentions.clear()

    def _of_block(self, mlp: str) -> AttentionEvent:
        """The attention whose name has most in common with the MLP's; of equal ones the latest."""
        parts = mlp.split(".")

        def common(name: str) -> int:
            pairs = zip(parts, name.split("."), strict=False)
            return next((n for n, (a, b) in enumerate(pairs) if a != b), len(parts))

        if not self._attentions:
            raise ValueError("no attention was seen before it")
        return self._attentions[max(reversed(self._attentions), key=common)]


class BlockInputs:
    """An observer that keeps what the block around each attention was given: one row per distinct token."""

    wants = (BlockInput,)

    def __init__(self) -> None:
        self.states: dict[Place, Tensor] = {}  # (tokens, d), by attention
        self.tokens: dict[
            Place, Tensor
        ] = {}  # (tokens,) their numbers, where the model was given tokens
        self.positions: dict[Place, Tensor] = {}  # (tokens,) their places in their windows

    def observe(self, event: BlockInput) -> None:
        """The first time that it is seen."""
        if event.place not in self.states:
            places = event.distinct_places
            self.states[event.place] = event.distinct.cpu()
            self.positions[event.place] = (places % event.states.shape[1]).cpu()
            if event.tokens is not None:
                self.tokens[event.place] = event.tokens.flatten()[places].cpu()

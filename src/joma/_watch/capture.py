"""Seeing every attention that a model computes, in whatever way it computes it.

A `TorchFunctionMode` around the outermost module call sees `scaled_dot_product_attention`, the softmax over a product
of two activations (eager attention), and `F.multi_head_attention_forward`, which hides its inside: there a dispatch
mode looks on. Statistics are taken on the spot, as sums over queries a head, and nothing else is kept.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from joma._gauges.attention import AttentionStats, attention_stats, attention_stats_from_scores
from joma._watch.calls import call_pristine, is_compiled
from joma._watch.tally import Tally

Padding = str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]

_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_PRODUCT = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
}  # fmt: skip
# arguments (True for padding) that say which queries are padding; "attention_mask" says which are not
_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
_MAX_TOKENS = 1024  # rows that a hidden-state gauge is given at most


def looks_like_attention(kind: type[nn.Module]) -> bool:
    """By the name of the class; used for messages and for layers that a pass may skip, never to decide what is seen."""
    return bool(_ATTENTION.search(kind.__name__))


class NotWatchable(ValueError):
    """Attention is computed in a way that cannot be measured."""


@dataclass(eq=False)
class Call:
    """A module that is running now."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    invocation: int  # 0 for its first call in this pass, 1 for the second (shared weights), …
    products: set[tuple[int, int]] = field(default_factory=set)  # (rows, columns) of products of two activations

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name."""
        return dict(zip(_parameters(self.module.__class__.forward), self.args, strict=False)) | self.kwargs

    @property
    def states(self) -> Tensor | None:
        """The first floating tensor that the module was given."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return None


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


class Capture:
    """Hears of the calls of a model's modules and fills a `Tally`."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str], tally: Tally, padding: Padding | None) -> None:
        self.model, self.names, self.tally, self.padding = model, names, tally, padding
        # a compiled model is left alone; an extra pass in eager mode is measured instead
        self.replays = any(is_compiled(module) for module in model.modules())
        self.problems: dict[str, str] = {}  # module -> what went wrong while measuring it
        self.refusal: str | None = None
        self.ran: dict[str, type[nn.Module]] = {}  # modules that ran in this step
        self.losses: list[Tensor] = []
        self.trains = False  # a pass with gradients was seen: passes without are validation, and not measured
        self._passing = False
        self._stack: list[Call] = []
        self._counts: Counter[nn.Module] = Counter()
        self._storages: set[int] = set()

    def on_call(self, module: nn.Module, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called; the outermost call is a pass."""
        if self._passing:
            return self._inside(module, call, args, kwargs)
        grad = torch.is_grad_enabled()
        self.trains |= grad
        if self.trains and not grad:
            return call_pristine(module, args, kwargs)
        if self.replays:
            output = call_pristine(module, args, kwargs)
            inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
            self.run_aside(inner, args, kwargs, grad)
        else:
            output = self._run_pass(module, call, args, kwargs, grad)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if grad and isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach())
        return output

    def run_aside(self, module: nn.Module, args: Any, kwargs: dict[str, Any], grad: bool = False) -> None:
        """An extra pass, measured, that training does not notice: no gradients, random state and buffers put back."""
        devices = {t.device for t in (*module.parameters(), *module.buffers()) if t.device.type == "cuda"}
        buffers = [(b, b._version, b.clone()) for b in module.buffers()]
        stance = torch.compiler.set_stance("force_eager") if self.replays else nullcontext()
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad(), stance:
            try:
                self._run_pass(module, lambda: module(*args, **kwargs), args, kwargs, grad, entered=False)
            finally:
                for buffer, version, copy in buffers:
                    if buffer._version != version:
                        buffer.copy_(copy)

    def _run_pass(
        self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any], grad: bool,
        entered: bool = True,
    ) -> Any:  # fmt: skip
        """The outermost call, measured; ``entered`` if the module's own call is under way already."""
        self._counts.clear()
        self._storages = {p.untyped_storage().data_ptr() for p in module.parameters() if _plain(p)}
        self.tally.begin(grad)
        self._passing = True
        try:
            with _Seen(self):
                return self._inside(module, call, args, kwargs) if entered else call()
        finally:
            self._stack.clear()
            self._passing = False

    def _inside(self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        entry = Call(self.names[module], module, args, kwargs, self._counts[module])
        self._counts[module] += 1
        self.ran.setdefault(entry.name, type(module))
        depth = len(self._stack)
        self._stack.append(entry)
        try:
            return call()
        finally:
            del self._stack[depth:]
            if self._stack and next(module.parameters(), None) is None:  # a module that only multiplies
                self._stack[-1].products |= entry.products

    # What was seen

    def on_sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        """F.scaled_dot_product_attention with these arguments."""
        entry = self._stack[-1]
        if not (_plain(query) and _plain(key)):
            self._refuse(entry, f"gets sharded tensors ({type(query).__name__}: context or tensor parallelism)")
            return
        if attn_mask is not None and hasattr(attn_mask, "_materialize"):  # torch.nn.attention.bias.CausalBias
            attn_mask = attn_mask._materialize(query.device)
        shape = tuple(query.shape[:-2])
        if query.dim() == 3:
            shape = self._split(query.shape[0], query.shape[1])
        elif query.dim() > 4:
            query, key = query.flatten(1, -3), key.flatten(1, -3)
            attn_mask = None if attn_mask is None else attn_mask.expand(*shape, -1, -1).flatten(1, -3)
            shape = tuple(query.shape[:-2])
        if query.dim() == 3:
            query, key = query.unflatten(0, shape), key.unflatten(0, shape)
            if attn_mask is not None and attn_mask.dim() == 3 and attn_mask.shape[0] > 1:
                attn_mask = attn_mask.unflatten(0, shape)
        with _exact(query.device):
            self.add_product(entry, query, key, attn_mask, is_causal, scale, enable_gqa)

    def on_softmax(self, scores: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        """A softmax; attention if it is over a product of two activations."""
        if (
            dim not in (-1, scores.dim() - 1)
            or scores.dim() < 3
            or not scores.is_floating_point()
            or not scores.numel()
        ):
            return
        columns = scores.shape[-1]
        rows = scores.numel() // columns
        for entry in reversed(self._stack):
            # one column more than keys: a learned sink beside them
            if (rows, columns) in entry.products or (rows, columns - 1) in entry.products:
                self.on_scores(scores, entry)
                return

    def on_scores(self, scores: Tensor, entry: Call, batch: int | None = None) -> None:
        """Scores (…, Tq, Tk) of an attention."""
        if not _plain(scores):
            self._refuse(entry, f"gets sharded tensors ({type(scores).__name__})")
            return
        if scores.dim() == 3:
            N, Tq = scores.shape[:2]
            scores = scores.unflatten(0, (batch, N // batch) if batch else self._split(N, Tq))
        elif scores.dim() > 4:
            scores = scores.flatten(1, -3)
        with _exact(scores.device):
            self.add_scores(entry, scores)

    def on_product(self, output: Tensor, args: tuple[Any, ...]) -> None:
        """A product; of two activations, it may be the scores of an attention."""
        operands = [a for a in _flat(args) if isinstance(a, Tensor) and a.dim() >= 2]
        if len(operands) < 2 or not isinstance(output, Tensor) or output.dim() < 3 or not output.numel():
            return
        if all(_plain(a) and a.untyped_storage().data_ptr() not in self._storages for a in operands):
            self._stack[-1].products.add((output.numel() // output.shape[-1], output.shape[-1]))

    def add_product(
        self, entry: Call, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
    ) -> None:
        """An attention of queries (B, H, Tq, d) and keys (B, Hk, Tk, d) was seen."""
        self._add(entry, attention_stats(query, key, mask, causal, scale, gqa))

    def add_scores(self, entry: Call, scores: Tensor) -> None:
        """An attention with these scores (B, H, Tq, Tk) was seen."""
        self._add(entry, attention_stats_from_scores(scores))

    def _add(self, entry: Call, stats: AttentionStats) -> None:
        B, _, Tq = stats.entropy.shape
        real = self._real_queries(B, Tq, stats.entropy.device)
        states = entry.states
        source = None if states is None else states.data_ptr()
        self.tally.add_attention(entry.name, entry.invocation, stats, real, source)
        if self.tally.hidden_gauges:
            block = next((c for c in reversed(self._stack) if c.name.rpartition(".")[2].isdigit()), entry)
            states = block.states if block.states is not None else entry.states
            if states is not None and states.dim() == 3 and _plain(states):
                with _exact(states.device):
                    rows = self._representatives(states, real)
                    self.tally.add_hidden(entry.name, entry.invocation, rows)

    def _split(self, N: int, Tq: int) -> tuple[int, int]:
        """(batch, heads) of a merged leading dimension of N, from what the module was given."""
        states = self._stack[-1].states
        if states is not None and states.dim() == 3:
            for axis in (0, 1):
                if states.shape[1 - axis] == Tq and N % states.shape[axis] == 0:
                    return states.shape[axis], N // states.shape[axis]
        return N, 1

    def _real_queries(self, B: int, Tq: int, device: torch.device) -> Tensor | None:
        """(B, 1, Tq), True for queries that are not padding; None if none is known to be."""
        if callable(self.padding):
            mask = self.padding(self._stack[0].args, self._stack[0].kwargs)
            return _rows(mask, B, Tq, device)
        for call in reversed(self._stack):
            arguments = call.arguments
            if self.padding is not None:
                if self.padding in arguments:
                    return _rows(arguments[self.padding], B, Tq, device)
                continue
            for name in _PADDED:
                if name == "key_padding_mask" and not (len(call.args) > 1 and call.args[0] is call.args[1]):
                    continue  # of the memory that is attended to
                if (padded := _rows(arguments.get(name), B, Tq, device)) is not None:
                    return ~padded
            if "attention_mask" in arguments:
                mask = arguments["attention_mask"]
                if mask is None or _rows(mask, B, Tq, device) is not None:
                    return _rows(mask, B, Tq, device)
        return None

    def _representatives(self, states: Tensor, real: Tensor | None) -> Tensor:
        """States (n, d) of real tokens: one a distinct token if the model was given tokens; a bounded number."""
        B, T = states.shape[:2]
        keep = torch.ones(B, T, dtype=torch.bool, device=states.device) if real is None else real[:, 0].expand(B, T)
        index = keep.flatten().nonzero()[:, 0]
        if (tokens := self._tokens(B, T)) is not None:
            order = torch.sort(tokens.flatten()[index], stable=True)
            first = torch.ones_like(order.values, dtype=torch.bool)
            first[1:] = order.values[1:] != order.values[:-1]
            index = index[order.indices[first].sort().values]
        step = max(1, -(-len(index) // _MAX_TOKENS))
        return states.detach().flatten(0, 1)[index[::step]]

    def _tokens(self, B: int, T: int) -> Tensor | None:
        """The tokens (B, T) that the innermost enclosing module was given."""
        for call in reversed(self._stack):
            for name, value in call.arguments.items():
                whole = (
                    isinstance(value, Tensor) and value.shape == (B, T) and value.dtype in (torch.int64, torch.int32)
                )
                if whole and not re.search("mask|position|type|label|target", name):
                    return value
        return None

    def _refuse(self, entry: Call, why: str) -> None:
        self.refusal = self.refusal or f"{entry.name} ({type(entry.module).__name__}) {why}; that cannot be watched"

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Training goes on whatever happens to a measurement."""
        try:
            yield
        except Exception as error:
            self.problems.setdefault(self._stack[-1].name, f"{type(error).__name__}: {error}")


class _Seen(TorchFunctionMode):
    """Looks at the functions called in a pass."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with self.capture.guarded():
                self.capture.on_sdpa(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            with _SeenInside(self.capture, args[0] if args else kwargs["query"]):
                return func(*args, **kwargs)
        elif func in _SOFTMAX:
            with self.capture.guarded():
                self.capture.on_softmax(*args, **kwargs)
        elif func in _PRODUCT:
            output = func(*args, **kwargs)
            with self.capture.guarded():
                self.capture.on_product(output, (*args, *kwargs.values()))
            return output
        return func(*args, **kwargs)


class _SeenInside(TorchDispatchMode):
    """Looks into F.multi_head_attention_forward, whose query is (T, B, d) or (T, d)."""

    def __init__(self, capture: Capture, query: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture, self.batch = capture, query.shape[1] if query.dim() == 3 else 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_scaled_dot_product_"):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            mask = given.get("attn_mask", given.get("attn_bias"))
            with self.capture.guarded():
                self.capture.on_sdpa(
                    given["query"], given["key"], given["value"], mask, 0.0, given.get("is_causal", False),
                    given.get("scale"), given["query"].shape[1] != given["key"].shape[1],
                )  # fmt: skip
        elif name in ("_softmax", "_safe_softmax"):
            with self.capture.guarded():
                self.capture.on_scores(args[0], self.capture._stack[-1], self.batch)
        return func(*args, **kwargs)


def _rows(mask: Any, B: int, Tq: int, device: torch.device) -> Tensor | None:
    """A mask (B or 1, Tq) of real queries as (B or 1, 1, Tq), or None if it is not one."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != Tq or mask.shape[0] not in (1, B):
        return None
    return (mask.to(device) != 0)[:, None]


def _plain(tensor: Any) -> bool:
    """Is this an ordinary tensor, all of it here?"""
    return isinstance(tensor, Tensor) and not hasattr(tensor, "to_local") and not hasattr(tensor, "elem")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Statistics are computed in the precision that they ask for, whatever the training around them uses."""
    autocast = torch.is_autocast_enabled(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        yield

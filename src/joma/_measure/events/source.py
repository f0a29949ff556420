"""The one place where a running model is looked at: a source of events for any number of observers.

Module calls come through the detour of `calls`; around the outermost one, a pass, a `TorchFunctionMode` sees what is
computed. The model computes the same bits with and without it, nothing is left on it, and nothing that an observer
does can raise into it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.aside import exactly
from joma._measure.events.axes import Heads, RecordedProjection
from joma._measure.events.calls import (
    install,
    is_bypassed,
    is_compiled,
    mind_border,
    quiet,
    uninstall,
)
from joma._measure.events.events import (
    KINDS,
    AttentionRefused,
    BlockInput,
    Call,
    Event,
    Hidden,
    ModuleBegins,
    ModuleEnds,
    Observer,
    Pass,
    PassBegins,
    PassEnds,
)
from joma._measure.events.extra_pass import CollectiveCallError, unnoticed
from joma._measure.events.facts import measured_facts, refused_facts
from joma._measure.events.finite import FiniteTrace
from joma._measure.events.functions import Functions, is_plain, is_sharded
from joma._measure.events.guard import Guard, Seen
from joma._measure.events.interface import interface_watched
from joma._measure.events.kernels import kernels_watched
from joma._measure.events.padding import StatedPadding, find_padding, real_tokens
from joma._measure.events.reasons import Reason, Refusal
from joma._measure.events.structure import Structure
from joma._measure.gauges.attention import mask_of
from joma._measure.gauges.masks import Mask
from joma.models.matrices import find_matrices, plain_name

_TRANSFORMED = Refusal(
    Reason.TRANSFORMED,
    "it runs inside torch.func (grad, vmap, …), where values cannot be read; give a probe batch",
)

_THREADS = Refusal(
    Reason.THREADS,
    "it was called in another thread during a pass, and that call is not measured; to measure both, watch a copy of "
    "the model in each thread",
)
_CHANGED_INPUT = Refusal(
    Reason.CHANGED_INPUT,
    "its forward pass changes its input in place, so that the pass cannot be repeated outside of compiled code; give a "
    "probe batch",
)

# modules whose channels come second, (B, W, …)
_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
_MOST_PROJECTIONS = 12  # that are kept of one module, the latest

_NESTED = Refusal(
    Reason.NESTED,
    "it attends with nested tensors, which are not measured; pack documents with a block-diagonal mask, or pad them",
)


def upper_mlps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of the upper matrix of each MLP, in the order of the layers."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    names = [matrix.name for matrix in find_matrices(model, "mlp_out")]
    if not names:
        raise ValueError(
            f"no MLP was found in {type(model).__name__}: no block maps d → h and then h → d"
        )
    if stacked := [name for name in names if name not in modules]:
        raise ValueError(
            f"{stacked[0]} is one of a stack of experts, whose neurons see only the tokens routed to them; "
            "superposition is measured on models without experts"
        )
    if channels_second := [
        name for name in names if isinstance(modules[name], nn.modules.conv._ConvNd)
    ]:
        raise ValueError(
            f"{channels_second[0]} is a convolution, whose neurons come before the tokens; superposition is measured "
            "on MLPs of linear maps"
        )
    return [(name, modules[name]) for name in names]


class PassComplete(Exception):
    """A pass is over: all that was to be seen of it was seen. Raised by a source that has an ``until``."""


class EventSource:
    """Events of a model's passes, for observers that want them.

    A pass with gradients is training; from the first one on, passes without are validation, and give no events. Before
    it, passes without gradients that generate text token by token give none either. A compiled model is left alone: its
    pass is made once more in eager mode, and that one gives the events.

    Attributes:
        names: module -> its name in the model.
        problems: module -> the first exception of an observer, or of the source itself, while it ran.
        refusal: why the attention of this model cannot be seen at all, if so.
        ran: modules that ran, name -> type; whoever reads it clears it.
        running: modules that are running now, the outermost first.
        guard: decides which attention becomes an event.
        is_alone: other processes train the same model and do not make its extra passes.
        trains: a pass with gradients was seen, or is sure to come.
        compiled_calls: how many calls of compiled functions began, outside of this source's own passes; whoever reads
            it clears it.
        has_replayed: a pass was made once more; whoever reads it clears it.
        left_out: why passes were not measured -> how many; whoever reads it clears it.
        was_bypassed: another library took the detour of module calls away while this source listened.
        trace: finds the first module whose output is not finite, if it is asked for.
        until: stop a pass, by `PassComplete`, when the hidden neurons of this layer were seen; a compiled model goes on.
    """

    def __init__(
        self, model: nn.Module, observers: Sequence[Observer], padding: StatedPadding | None = None,
        until: int | None = None, heads: Mapping[str, Heads] | None = None, trace: FiniteTrace | None = None,
        is_alone: bool = False, trains: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.padding, self.until = model, padding, until
        self.heads = dict(heads or {})  # module -> the user's word; "" for all
        self.trace = trace
        self._structure = Structure(model)
        self.names = self._structure.names
        self.problems: dict[str, Exception] = {}
        self.refusal: str | None = None
        self.ran: dict[str, type[nn.Module]] = {}
        self.running: list[Call] = []
        self._observers = {
            kind: tuple(
                observer for observer in observers if issubclass(kind, tuple(observer.wants))
            )
            for kind in KINDS
        }
        self._begins, self._ends = (
            self.wants(ModuleBegins),
            self.wants(ModuleEnds),
        )  # asked at every module call
        self._mlps = (
            {mlp: n for n, (_, mlp) in enumerate(upper_mlps(model))} if self.wants(Hidden) else {}
        )
        self.is_alone = is_alone
        self.trains = trains
        self.compiled_calls = 0
        self.has_replayed = False
        self.left_out: Counter[str] = Counter()
        self._generates = (
            False  # a pass without gradients made one token from the keys of those before
        )
        self._makes_one_token = False
        self.was_bypassed = False
        self._is_listening = False
        self._home = threading.get_ident()  # where passes without gradients are measured
        self._replaying = False
        self.guard = Guard(self)
        self._passing = self._observing = False
        self._thread = 0  # in which the pass runs
        self._counts: Counter[nn.Module] = Counter()
        self._storages: set[int] = set()  # of parameters
        self._mask: tuple[Any, Mask] | None = (
            None  # the last one, which is kept alive so that its address is its own
        )

    def renew(self) -> None:
        """Hear of the modules that the model has now; axes of attention are learnt again."""
        is_listening = uninstall(self)
        self._structure.take()
        self.names = self._structure.names
        self._mlps = (
            {mlp: n for n, (_, mlp) in enumerate(upper_mlps(self.model))}
            if self.wants(Hidden)
            else {}
        )
        self.guard = Guard(self)
        if is_listening:
            self.listen()

    # Listening

    def listen(self) -> None:
        """Give events of all passes from now on."""
        install(self, list(self.names))
        self._is_listening = True

    def leave(self) -> None:
        """Undo `listen`; harmless if it was not called."""
        if self._is_listening:
            self.was_bypassed = is_bypassed()
            self._is_listening = False
        uninstall(self)

    def claim_thread(self) -> None:
        """Measure passes without gradients in this thread only: those of other threads are evaluation."""
        self._home = threading.get_ident()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Give events of the passes within this block."""
        self.listen()
        try:
            yield
        finally:
            self.leave()

    def raise_problems(self) -> None:
        """Fail after a pass in which something went wrong; for tools whose only purpose is the measurement."""
        if self.refusal:
            raise ValueError(self.refusal)
        for name, error in self.problems.items():
            raise ValueError(f"{name}: {error}") from error

    # Passes

    @property
    def replays(self) -> bool:
        """True if a part of the model is compiled, so that passes are made once more to be seen."""
        return any(is_compiled(module) for module in self.model.modules())

    def on_call(
        self,
        module: nn.Module,
        call: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_compiled: bool = False,
    ) -> Any:
        """A module is called; the outermost call is a pass."""
        if self._passing and self._thread == threading.get_ident():
            if self._observing:  # an observer calls it
                return call()
            return self._inside(module, call, args, kwargs)
        mind_border()
        if not self._passing and self._structure.has_changed():
            with self.guarded(Call(self.names[module], module, args, kwargs, 0)):
                self.renew()
        grad = torch.is_grad_enabled() or _is_checkpointed(args, kwargs)
        if not self._is_measured(module, args, kwargs, grad):
            with quiet():
                return call()
        if not (is_compiled or self.replays):
            return self._run_pass(
                module, lambda: self._inside(module, call, args, kwargs), args, kwargs, grad
            )
        versions = _versions(args, kwargs)
        with quiet():
            output = call()
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        with self.guarded(Call(self.names[module], module, args, kwargs, 0)):
            if _versions(args, kwargs) != versions:
                raise _CHANGED_INPUT
            self.has_replayed = True
            self._run_aside(inner, args, kwargs, grad, lambda _: output)
        return output

    def on_compiled_call(self) -> bool:
        """A compiled call begins; False if a pass is under way in another thread, whose modules must be seen."""
        if not self._passing:
            self.compiled_calls += 1
            return True
        return self._thread == threading.get_ident()

    def _is_measured(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool
    ) -> bool:
        """True if a pass that begins now is one to measure."""
        if self._passing:
            # While evaluation runs in a thread of its own, training in this one is what counts.
            if grad:
                self.problems.setdefault(self.names[module], _THREADS)
            return False
        if _is_called_from(
            _file_of("torch.jit._trace")
        ):  # which runs the model, too, to check what it has traced
            return False
        self.trains |= grad
        self._makes_one_token = not grad and _has_one_token(args, kwargs)
        if not grad and threading.get_ident() != self._home:
            return False
        if not grad and self.trains:
            self.left_out["without gradients"] += 1
            return False
        if self._makes_one_token and self._generates:
            self.left_out["making one token from those before"] += 1
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.problems.setdefault(self.names[module], _TRANSFORMED)
            return False
        return True

    def run_aside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An extra pass that training does not notice: no gradients, random state and buffers put back."""
        self._makes_one_token = False
        self._run_aside(module, args, kwargs, False, lambda output: output)

    def _run_aside(
        self,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        grad: bool,
        returned: Callable[[Any], Any],
    ) -> None:
        self._replaying = True
        try:
            with unnoticed(module, args, kwargs, self.is_alone) as (own_args, own_kwargs):
                call = lambda: module(*own_args, **own_kwargs)  # noqa: E731
                self._run_pass(module, call, own_args, own_kwargs, grad, returned)
        except CollectiveCallError as error:  # what was seen until then is right
            self.problems.setdefault(self.names[module], Refusal(Reason.COLLECTIVE, str(error)))
        finally:
            self._replaying = False

    def _run_pass(
        self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any], grad: bool,
        returned: Callable[[Any], Any] = lambda output: output,
    ) -> Any:  # fmt: skip
        """The outermost call, with events; ``returned`` is what the user's own call gave."""
        outermost = Call(self.names[module], module, args, kwargs, 0)
        self._counts.clear()
        self._storages.clear()
        for parameter in module.parameters():
            with self.guarded(outermost):
                if is_plain(parameter):
                    self._storages.add(parameter.untyped_storage().data_ptr())
        self._passing, self._thread = True, threading.get_ident()
        # under gradients, outputs of projections live on anyway; without, they are held in the first pass only
        self.guard.collects = torch.is_grad_enabled() or self.guard.is_new
        current = Pass(grad, module.training)
        try:
            self._emit(
                PassBegins, outermost, grad=grad, current=current, autocast=_autocast(module)
            )
            with ExitStack() as stack:
                looking = stack.enter_context(Functions(self))
                for looked_at in (interface_watched(self), kernels_watched(self, looking)):
                    with self.guarded(outermost):
                        stack.enter_context(looked_at)
                output = call()
            if grad:
                with self.guarded(outermost):
                    _mark_backward(returned(output), current)
            self._emit(PassEnds, outermost, grad=grad, current=current, output=returned(output))
            self.guard.is_new = False
            return output
        finally:
            self.running.clear()
            if self.trace is not None:
                self.trace.end_pass()
            self._passing, self._mask = False, None

    def _inside(
        self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if (
            self.running
            and self.running[-1].module is module
            and _are_same(self.running[-1].args, args)
        ):
            return call()  # torch.compile(module) calls the module itself
        entry = Call(self.names[module], module, args, kwargs, self._counts[module])
        self._counts[module] += 1
        self.ran.setdefault(entry.name, type(module))
        depth = len(self.running)
        mark = 0 if self.trace is None else self.trace.mark()
        self.running.append(entry)
        try:
            if self._begins:
                self._emit(ModuleBegins, entry)
            if (layer := self._mlps.get(module)) is not None:
                with self.guarded():
                    self._emit(Hidden, entry, layer=layer, states=self._hidden(entry))
                if layer == self.until and not self._replaying:
                    raise PassComplete
            output = call()
            with self.guarded(entry):
                self._after(entry, output, depth, mark)
            return output
        finally:
            del self.running[depth:]
            if (
                self.running and next(module.parameters(), None) is None
            ):  # a module that only multiplies
                self.running[-1].products |= entry.products

    def _after(self, entry: Call, output: Any, depth: int, mark: int) -> None:
        """A module has returned its output."""
        parent = self.running[depth - 1] if depth else None
        if entry.held:
            with self.guarded(entry):
                self.guard.settle(entry, parent)
        if self.guard.collects and parent is not None:
            with self.guarded(entry):
                _collect(entry, parent, output)
        if self._ends:
            self._emit(ModuleEnds, entry, output=output)
        if self.trace is not None:
            self.trace.keep(entry, output)
            if depth == 0 or entry.name in self.trace.blocks:
                self._end_block(self.trace, entry, output, mark, depth == 0)

    def _end_block(
        self, trace: FiniteTrace, entry: Call, output: Any, mark: int, is_outermost: bool
    ) -> None:
        states = entry.states
        device = "cpu" if states is None else states.device.type
        with self.guarded(entry), exactly(device):
            trace.end_block(entry, output, mark, is_outermost)

    def _hidden(self, entry: Call) -> Tensor:
        """What an upper MLP matrix is given, (B, T, h); OPT puts all windows one after the other here."""
        states = next(x for x in (*entry.args, *entry.kwargs.values()) if isinstance(x, Tensor))
        outermost = self.running[0]
        tokens = next(
            (x for x in (*outermost.args, *outermost.kwargs.values()) if isinstance(x, Tensor)),
            None,
        )
        if (
            states.dim() == 2
            and tokens is not None
            and tokens.dim() == 2
            and len(states) == math.prod(tokens.shape)
        ):
            states = states.unflatten(0, tuple(tokens.shape))
        if states.dim() != 3:
            raise ValueError(f"it is given states of shape {tuple(states.shape)}, not (B, T, h)")
        return states

    # Events

    def wants(self, *kinds: type[Event]) -> bool:
        """Does anybody want events of one of these kinds?"""
        return any(self._observers[kind] for kind in kinds)

    def emit_attention(self, seen: Seen) -> None:
        """An attention was seen in a module; the input of its block is an event too."""
        call, calls, ordinal = seen.call, seen.calls, seen.ordinal
        fields = seen.event_fields()
        if fields.get("mask") is not None:
            fields = fields | {
                "mask_facts": self.facts(fields["mask"], fields["query"], fields["key"])
            }
        assert seen.layout is not None
        event = seen.kind(call=call, calls=calls, ordinal=ordinal, **fields)
        if self._makes_one_token and event.shape[2] == 1 and seen.key_count > 1:
            self._generates = (
                True  # text is being generated from a cache of keys: not what a model is trained on
            )
            return
        with exactly(event.device.type):
            try:
                padding = find_padding(event, self.padding, bool(seen.is_self), seen.layout.certain)
            except Refusal as refusal:
                self.guard.facts[call.name, ordinal] = refused_facts(seen, refusal)
                self.refuse(call, calls, refusal)
                return
            if seen.is_new:
                with self.guarded(call):
                    self.guard.facts[call.name, ordinal] = measured_facts(seen, event, padding)
        real = padding.is_real
        self._emit(seen.kind, call, calls, real=real, ordinal=ordinal, **fields)
        if self.wants(BlockInput):
            block = event.block
            states = call.states if block.states is None else block.states
            if states is not None and states.dim() == 3 and is_plain(states):
                B, T, _ = states.shape
                same_tokens = (event.shape[0], event.shape[2]) == (B, T)
                tokens = (
                    real if same_tokens else real_tokens(calls, self.padding, B, T, states.device)
                )
                self._emit(BlockInput, call, calls, real=tokens, ordinal=ordinal, states=states)

    def refuse(self, call: Call, calls: tuple[Call, ...], refusal: Refusal) -> None:
        """The attention of a module cannot be measured, and what was told of it in this pass is wrong."""
        self.problems.setdefault(call.name, refusal)
        self._emit(AttentionRefused, call, calls)

    def calls_to(self, call: Call) -> tuple[Call, ...]:
        """The running modules down to this one."""
        return tuple(self.running[: self.running.index(call) + 1])

    def _emit(
        self, kind: type[Event], call: Call, calls: tuple[Call, ...] = (), **fields: Any
    ) -> None:
        """Give an event to all who want it."""
        if not (observers := self._observers[kind]):
            return
        self._observing = True  # what observers compute is not looked at
        try:
            with self.guarded(call):
                event = kind(call=call, calls=calls or tuple(self.running) or (call,), **fields)
                with exactly(event.device.type):
                    for observer in observers:
                        with self.guarded(call):
                            observer.observe(event)
        finally:
            self._observing = False

    @contextmanager
    def guarded(self, call: Call | None = None) -> Iterator[None]:
        """The model goes on whatever happens to a measurement."""
        try:
            yield
        except Exception as error:
            # without its frames, which hold tensors of the pass
            self.problems.setdefault((call or self.running[-1]).name, error.with_traceback(None))

    def measurable(self, call: Call, *tensors: Tensor) -> bool:
        """Can these be measured? If not, the reason is kept."""
        if any(tensor.is_nested for tensor in tensors):
            self.problems.setdefault(call.name, _NESTED)
            return False
        if all(map(is_plain, tensors)):
            return True
        sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
        if sharded is not None:
            self.refusal = self.refusal or (
                f"{call.name} ({type(call.module).__name__}) gets sharded tensors ({type(sharded).__name__}: context "
                f"or tensor parallelism); that cannot be watched {Reason.SHARDED}"
            )
        else:
            self.problems.setdefault(call.name, _TRANSFORMED)
        return False

    def facts(self, mask: Tensor, query: Tensor, key: Tensor) -> Mask:
        """What a mask says, looked at once for all layers of a pass that are given it."""
        which = (
            mask.data_ptr(),
            mask._version,
            mask.dtype,
            mask.shape,
            mask.stride(),
            query.shape[2],
            key.shape[2],
        )
        if self._mask is None or self._mask[0] != which:
            self._mask = (which, mask_of(mask, query, key))
        return self._mask[1]

    def heads_of(self, module: str) -> Heads | None:
        """What the user says about the heads of a module, or of one around it; the innermost wins."""
        fitting = [
            name for name in self.heads if name in ("", module) or module.startswith(f"{name}.")
        ]
        return self.heads[max(fitting, key=len)] if fitting else None

    def is_parameter(self, tensor: Tensor) -> bool:
        """Does it share its memory with a parameter of the model?"""
        return tensor.untyped_storage().data_ptr() in self._storages


def _are_same(args: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(args) == len(others) and all(a is b for a, b in zip(args, others, strict=True))


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return how often each tensor among the arguments was written to."""
    tensors = [
        x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_inference()
    ]
    return [tensor._version for tensor in tensors]


def _file_of(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _is_called_from(file: str | None, function: str | None = None) -> bool:
    """True if code of this file, or one function in it, is running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and function in (None, code.co_name):
            return True
        frame = frame.f_back
    return False


def _is_checkpointed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True in the forward pass of a reentrant checkpoint, which is training though it computes without gradients.

    Its inputs tell it from validation: they are made with gradients.
    """
    has_gradients = any(
        isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())
    )
    return has_gradients and _is_called_from(_file_of("torch.utils.checkpoint"), "forward")


def _has_one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model is given one token per sample, (B, 1) or (B, 1, d)."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return first is not None and first.dim() > 1 and first.shape[1] == 1


def _mark_backward(output: Any, current: Pass) -> None:
    """Let the pass know when gradients go back through its output; they stay what they are."""

    def mark(gradients: Any) -> None:
        current.has_backward = True

    tensors = list(_tensors(output))
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(mark)
    # A reentrant checkpoint computes without gradients, and other outputs do not show their tensors.
    if not tensors or (
        not any(tensor.requires_grad for tensor in tensors) and not torch.is_grad_enabled()
    ):
        current.has_backward = True


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model returned."""
    if isinstance(output, Tensor):
        yield output
        return
    parts: Iterable[Any] = ()
    if isinstance(output, (list, tuple)):
        parts = output
    elif isinstance(output, Mapping):
        parts = output.values()
    elif hasattr(output, "__dict__"):
        parts = [part for part in vars(output).values() if isinstance(part, Tensor)]
    for part in parts:
        yield from _tensors(part)


def _collect(entry: Call, parent: Call, output: Any) -> None:
    """Keep what a module gave for the attention around it, as long as axes are learnt."""
    parent.has_attention |= entry.has_attention or entry.attentions > 0
    if entry.has_attention or entry.attentions or not is_plain(output):
        return
    if output.is_floating_point() and output.dim() >= 2:
        inner = entry.projections[-1] if entry.projections else None
        is_convolution = isinstance(entry.module, _CONVOLUTIONS) or (
            inner is not None and inner.is_convolution and inner.output.shape == output.shape
        )
        parent.projections.append(RecordedProjection(entry.states, output, is_convolution))
        del parent.projections[:-_MOST_PROJECTIONS]


def _autocast(module: nn.Module) -> torch.dtype | None:
    """The type that autocast computes in where the module's parameters are; None without."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

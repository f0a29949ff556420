"""The one place where a running model is looked at: a source of events for any number of observers.

Module calls come through the detour of `joma._measure.events.calls`. The outermost call is a pass;
around it the backends of `joma._measure.events.backends` recognise attention. The model computes
the same bits with and without a source, nothing is left on it, and nothing that an observer does
can raise into it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma._measure.events.aside import exactly
from joma._measure.events.axes import Heads, record_projection
from joma._measure.events.backends.backend_table import watch_backends
from joma._measure.events.calls import (
    install,
    is_bypassed,
    is_compiled,
    mind_border,
    quiet,
    remove_unused_detour,
    uninstall,
)
from joma._measure.events.emitter import Emitter
from joma._measure.events.events import (
    AttentionEvent,
    BlockInput,
    Call,
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
from joma._measure.events.guard import AttentionCandidate, Guard
from joma._measure.events.hidden_neurons import hidden_states, upper_mlps
from joma._measure.events.module_snapshot import ModuleSnapshot
from joma._measure.events.padding import StatedPadding, find_padding, real_tokens
from joma._measure.events.pass_kinds import (
    autocast_dtype,
    has_gradients,
    has_one_token,
    input_versions,
    is_traced,
    mark_backward,
)
from joma._measure.events.reasons import Reason, Refusal
from joma._measure.events.running_pass import RunningPass
from joma._measure.events.tensors import is_plain, is_sharded

_TRANSFORMED = Refusal(
    Reason.TRANSFORMED,
    "it runs inside torch.func (grad, vmap, …), where values cannot be read; give a probe batch",
)
_THREADS = Refusal(
    Reason.THREADS,
    "it was called in another thread during a pass, and that call is not measured; to measure "
    "both, watch a copy of the model in each thread",
)
_CHANGED_INPUT = Refusal(
    Reason.CHANGED_INPUT,
    "its forward pass changes its input in place, so that the pass cannot be repeated outside of "
    "compiled code; give a probe batch",
)
_NESTED = Refusal(
    Reason.NESTED,
    "it attends with nested tensors, which are not measured; pack documents with a block-diagonal "
    "mask, or pad them",
)

# Stands for "the output of the pass itself" where an output may be anything, None included.
_OUTPUT_OF_PASS = object()


class PassComplete(Exception):
    """Everything wanted of a pass has been seen. Raised by a source that has an ``until``."""


class EventSource(Emitter):
    """Events of a model's passes, for observers that want them.

    A pass with gradients is training; from the first one on, passes without are validation, and
    give no events. Before it, passes without gradients that generate text token by token give none
    either. A compiled model is left alone: its pass is made once more in eager mode, and that one
    gives the events.

    Arguments:
        model: the model.
        observers: who is given events.
        padding: the user's word on padding, if any.
        until: stop a pass, by `PassComplete`, when the hidden neurons of this layer were seen; a
            compiled model goes on.
        heads: module -> the user's word on its heads; "" for all modules.
        trace: finds the first module whose output is not finite.
        is_alone: other processes train the same model and do not make its extra passes.
        trains: a pass with gradients is sure to come.

    Attributes:
        names: module -> its name in the model.
        refusal: why the attention of this model cannot be measured at all, if so.
        ran: modules that ran, name -> type; whoever reads it clears it.
        guard: decides which attention becomes an event.
        trains: a pass with gradients was seen, or is sure to come.
        compiled_calls: how many calls of compiled functions began, outside of this source's own
            passes; whoever reads it clears it.
        has_replayed: a pass was made once more; whoever reads it clears it.
        left_out: why passes were not measured -> how many; whoever reads it clears it.
        was_bypassed: another library took the detour of module calls away while this source
            listened.
        function_mode: the mode that sees the functions of the running pass.
    """

    def __init__(
        self,
        model: nn.Module,
        observers: Sequence[Observer],
        padding: StatedPadding | None = None,
        until: int | None = None,
        heads: Mapping[str, Heads] | None = None,
        trace: FiniteTrace | None = None,
        is_alone: bool = False,
        trains: bool = False,
    ) -> None:
        super().__init__(observers)
        self.model = model
        self.padding = padding
        self.until = until
        self.heads = dict(heads or {})
        self.trace = trace
        self.is_alone = is_alone
        self.trains = trains
        self.refusal: str | None = None
        self.ran: dict[str, type[nn.Module]] = {}
        self.compiled_calls = 0
        self.has_replayed = False
        self.left_out: Counter[str] = Counter()
        self.was_bypassed = False
        self.function_mode: TorchFunctionMode | None = None
        self._snapshot = ModuleSnapshot(model)
        self.names = self._snapshot.names
        self.guard = Guard(self)
        self._mlp_layers = self._number_mlps()
        # Asked at every call of a module.
        self._wants_begins = self.wants(ModuleBegins)
        self._wants_ends = self.wants(ModuleEnds)
        self._is_listening = False
        self._home_thread = threading.get_ident()
        self._pass: RunningPass | None = None
        self._is_replaying = False
        self._has_one_token = False  # the pass that is running makes one token per sample
        self._generates = False  # such a pass attended to keys of earlier passes

    # Listening to the model

    def listen(self) -> None:
        """Give events of all passes from now on."""
        install(self, list(self.names))
        self._is_listening = True

    def leave(self) -> None:
        """Undo `listen`; harmless if it was not called."""
        self.pause()
        remove_unused_detour()

    def pause(self) -> None:
        """Give no events until `listen` or `leave` is called, which must follow soon.

        Calls of modules take the detour all the while. To remove and insert it makes Python forget
        what it knows about all subclasses of `nn.Module`, which takes 1 ms per step.
        """
        if self._is_listening:
            self.was_bypassed = is_bypassed()
            self._is_listening = False
        uninstall(self)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Give events of the passes within this block."""
        self.listen()
        try:
            yield
        finally:
            self.leave()

    def claim_thread(self) -> None:
        """Measure passes without gradients in this thread only; others are evaluation."""
        self._home_thread = threading.get_ident()

    def renew(self) -> None:
        """Take the modules that the model has now; axes of attention are learnt again."""
        is_listening = uninstall(self)
        self._snapshot.take()
        self.names = self._snapshot.names
        self._mlp_layers = self._number_mlps()
        self.guard = Guard(self)
        if is_listening:
            self.listen()

    def _number_mlps(self) -> dict[nn.Module, int]:
        """Return upper matrix of an MLP -> its layer; empty if nobody wants hidden neurons."""
        if not self.wants(Hidden):
            return {}
        return {module: layer for layer, (_, module) in enumerate(upper_mlps(self.model))}

    def raise_problems(self) -> None:
        """Raise what went wrong in a pass, for tools whose only purpose is the measurement."""
        if self.refusal:
            raise ValueError(self.refusal)
        for name, error in self.problems.items():
            raise ValueError(f"{name}: {error}") from error

    # Which calls are passes to measure

    @property
    def replays(self) -> bool:
        """True if a part of the model is compiled, so that passes are made once more to be seen."""
        # The modules of the snapshot: to walk over the model again takes longer.
        return any(is_compiled(module) for module in self.names)

    def on_call(
        self,
        module: nn.Module,
        call: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_compiled: bool = False,
    ) -> Any:
        """Run a call of a module; the outermost call is a pass."""
        current = self._pass
        if current is not None and current.thread == threading.get_ident():
            if self.is_emitting:  # an observer calls the model
                return call()
            return self._run_module(current, module, call, args, kwargs)
        mind_border()
        outermost = Call(self.names[module], module, args, kwargs, 0)
        if current is None and self._snapshot.has_changed():
            with self.guarded(outermost):
                self.renew()
            if module not in self.names:  # it was taken out of the model
                with quiet():
                    return call()
            outermost = Call(self.names[module], module, args, kwargs, 0)
        is_training = has_gradients(args, kwargs)
        if not self._is_measured(outermost, is_training):
            with quiet():
                return call()
        if is_compiled or self.replays:
            return self._run_twice(outermost, call, is_training)

        def run(current: RunningPass) -> Any:
            return self._run_module(current, module, call, args, kwargs)

        return self._run_pass(outermost, run, is_training)

    def on_compiled_call(self) -> bool:
        """Count a compiled call that begins.

        False if a pass is under way in another thread, whose modules must be seen.
        """
        if self._pass is None:
            self.compiled_calls += 1
            return True
        return self._pass.thread == threading.get_ident()

    def _is_measured(self, outermost: Call, is_training: bool) -> bool:
        """True if a pass that begins now is one to measure."""
        if self._pass is not None:
            # Another thread is in a pass. Evaluation may run next to training; two trainings
            # cannot be told apart.
            if is_training:
                self.problems.setdefault(outermost.name, _THREADS)
            return False
        if is_traced():
            return False
        self.trains |= is_training
        self._has_one_token = not is_training and has_one_token(outermost.args, outermost.kwargs)
        if not is_training and threading.get_ident() != self._home_thread:
            return False
        if not is_training and self.trains:
            self.left_out["without gradients"] += 1
            return False
        if self._has_one_token and self._generates:
            self.left_out["making one token from those before"] += 1
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.problems.setdefault(outermost.name, _TRANSFORMED)
            return False
        return True

    # Passes

    def run_aside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make an extra pass that training does not notice: without gradients, state put back."""
        self._has_one_token = False
        outermost = Call(self.names[module], module, args, kwargs, 0)
        self._run_aside(outermost, is_training=False, user_output=_OUTPUT_OF_PASS)

    def _run_twice(self, outermost: Call, call: Callable[[], Any], is_training: bool) -> Any:
        """Run a compiled model as it is, unseen, and once more in eager mode to be seen.

        A function mode around a compiled call costs a recompilation, or crashes the model where
        the compiler breaks its graph; an extra pass without gradients is safe.
        """
        versions = input_versions(outermost.args, outermost.kwargs)
        with quiet():
            output = call()
        with self.guarded(outermost):
            if input_versions(outermost.args, outermost.kwargs) != versions:
                raise _CHANGED_INPUT
            self.has_replayed = True
            module = outermost.module
            if isinstance(module, nn.parallel.DistributedDataParallel):
                # Its own forward waits for the other processes.
                module = module.module
            inner = Call(self.names[module], module, outermost.args, outermost.kwargs, 0)
            self._run_aside(inner, is_training, user_output=output)
        return output

    def _run_aside(self, outermost: Call, is_training: bool, user_output: Any) -> None:
        module = outermost.module
        self._is_replaying = True
        try:
            with unnoticed(module, outermost.args, outermost.kwargs, self.is_alone) as copies:
                args, kwargs = copies
                copied = Call(outermost.name, module, args, kwargs, 0)

                def run(current: RunningPass) -> Any:
                    return module(*args, **kwargs)

                self._run_pass(copied, run, is_training, user_output)
        except CollectiveCallError as error:
            # What was seen until then is right.
            refusal = Refusal(Reason.COLLECTIVE, str(error))
            self.problems.setdefault(outermost.name, refusal)
        finally:
            self._is_replaying = False

    def _run_pass(
        self,
        outermost: Call,
        run: Callable[[RunningPass], Any],
        is_training: bool,
        user_output: Any = _OUTPUT_OF_PASS,
    ) -> Any:
        """Run the outermost call and give its events.

        Arguments:
            outermost: the call.
            run: makes the call.
            is_training: the pass is training, though it may compute without gradients.
            user_output: what the user's own call gave, if this is an extra one.
        """
        module = outermost.module
        current = RunningPass()
        for member in self._modules_in(module):
            for parameter in member._parameters.values():
                if parameter is not None:
                    with self.guarded(outermost):
                        current.add_parameter(parameter)
        self._pass = current
        # With gradients, outputs of projections live on anyway. Without, holding them costs
        # memory: in the first pass only.
        self.guard.collects = torch.is_grad_enabled() or self.guard.is_new
        facts = Pass(is_training, module.training)
        try:
            self.emit(
                PassBegins,
                outermost,
                grad=is_training,
                current=facts,
                autocast=autocast_dtype(module),
            )
            with ExitStack() as stack:
                for watching in watch_backends(self):
                    with self.guarded(outermost):
                        stack.enter_context(watching)
                output = run(current)
            if user_output is _OUTPUT_OF_PASS:
                user_output = output
            if is_training:
                with self.guarded(outermost):
                    mark_backward(user_output, facts)
            self.emit(PassEnds, outermost, grad=is_training, current=facts, output=user_output)
            self.guard.is_new = False
            return output
        finally:
            self.running.clear()
            if self.trace is not None:
                self.trace.end_pass()
            self._pass = None
            self.function_mode = None

    def _modules_in(self, module: nn.Module) -> Iterable[nn.Module]:
        if module is self.model:
            return self.names  # to walk over the model again takes longer
        return module.modules()

    # Modules inside a pass

    def _run_module(
        self,
        current: RunningPass,
        module: nn.Module,
        call: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one module of a pass and give its events."""
        running = self.running
        if running and running[-1].module is module and _are_same(running[-1].args, args):
            return call()  # torch.compile(module) calls the module itself
        entry = Call(self.names[module], module, args, kwargs, current.count(module))
        self.ran.setdefault(entry.name, type(module))
        depth = len(running)
        trace_mark = 0
        if self.trace is not None:
            trace_mark = self.trace.mark()
        running.append(entry)
        try:
            if self._wants_begins:
                self.emit(ModuleBegins, entry)
            if module in self._mlp_layers:
                self._emit_hidden(entry, self._mlp_layers[module])
            output = call()
            with self.guarded(entry):
                self._end_module(entry, output, depth, trace_mark)
            return output
        finally:
            del running[depth:]
            if entry.products and running and _has_no_parameters(module):
                # A module that only multiplies: the softmax may be in the module around it.
                running[-1].products |= entry.products

    def _emit_hidden(self, entry: Call, layer: int) -> None:
        with self.guarded():
            self.emit(Hidden, entry, layer=layer, states=hidden_states(entry, self.running[0]))
        if layer == self.until and not self._is_replaying:
            raise PassComplete

    def _end_module(self, entry: Call, output: Any, depth: int, trace_mark: int) -> None:
        """Settle the attention of a module that has returned, and give its events."""
        parent = None
        if depth > 0:
            parent = self.running[depth - 1]
        if entry.held:
            with self.guarded(entry):
                self.guard.settle(entry, parent)
        if self.guard.collects and parent is not None:
            # Unseen by the function mode of the pass, which would look at every question to a tensor.
            with self.guarded(entry), torch._C.DisableTorchFunction():
                record_projection(entry, parent, output)
        if self._wants_ends:
            self.emit(ModuleEnds, entry, output=output)
        if self.trace is not None:
            self.trace.keep(entry, output)
            if depth == 0 or entry.name in self.trace.blocks:
                with self.guarded(entry), exactly(_device_of(entry)):
                    self.trace.end_block(entry, output, trace_mark, is_outermost=depth == 0)

    # Attention

    def emit_attention(self, candidate: AttentionCandidate) -> None:
        """Give an attention that the guard found right, and the input of its block, as events."""
        assert candidate.layout is not None
        call = candidate.call
        calls = candidate.calls
        fields = candidate.event_fields()
        if fields.get("mask") is not None:
            assert self._pass is not None
            mask_facts = self._pass.read_mask(fields["mask"], fields["query"], fields["key"])
            fields = fields | {"mask_facts": mask_facts}
        event = candidate.kind(call=call, calls=calls, ordinal=candidate.ordinal, **fields)
        if self._has_one_token and event.shape[2] == 1 and candidate.key_count > 1:
            # Text is generated from a cache of keys, which is not what a model is trained on.
            self._generates = True
            return
        with exactly(event.device.type):
            try:
                padding = find_padding(
                    event, self.padding, bool(candidate.is_self), candidate.layout.is_certain
                )
            except Refusal as refusal:
                self.guard.facts[call.name, candidate.ordinal] = refused_facts(candidate, refusal)
                self.refuse(call, calls, refusal)
                return
            if candidate.is_new:
                with self.guarded(call):
                    facts = measured_facts(candidate, event, padding)
                    self.guard.facts[call.name, candidate.ordinal] = facts
        real = padding.is_real
        self.emit(candidate.kind, call, calls, real=real, ordinal=candidate.ordinal, **fields)
        if self.wants(BlockInput):
            self._emit_block_input(event, real)

    def _emit_block_input(self, event: AttentionEvent, real: Tensor | None) -> None:
        """Give the input (B, T, d) of the block around an attention as an event."""
        states = event.block.states
        if states is None:
            states = event.call.states
        if states is None or states.dim() != 3 or not is_plain(states):
            return
        samples, tokens, _ = states.shape
        # Real tokens of the block are the real queries, unless it attends with other tokens.
        if (event.shape[0], event.shape[2]) != (samples, tokens):
            real = real_tokens(event.calls, self.padding, samples, tokens, states.device)
        self.emit(
            BlockInput, event.call, event.calls, real=real, ordinal=event.ordinal, states=states
        )

    def measurable(self, call: Call, *tensors: Tensor) -> bool:
        """Return True if these tensors can be read; keep the reason if not."""
        if any(tensor.is_nested for tensor in tensors):
            self.problems.setdefault(call.name, _NESTED)
            return False
        for tensor in tensors:
            if is_sharded(tensor):
                self.refusal = self.refusal or (
                    f"{call.name} ({type(call.module).__name__}) gets sharded tensors "
                    f"({type(tensor).__name__}: context or tensor parallelism); that cannot be "
                    f"watched {Reason.SHARDED}"
                )
                return False
        if not all(map(is_plain, tensors)):
            self.problems.setdefault(call.name, _TRANSFORMED)
            return False
        return True

    def is_parameter(self, tensor: Tensor) -> bool:
        """True if a tensor shares its memory with a parameter of the model."""
        assert self._pass is not None
        return self._pass.is_parameter(tensor)

    def heads_of(self, module: str) -> Heads | None:
        """Return the user's word on the heads of a module, or of the innermost one around it."""
        heads = None
        longest = -1
        for name, stated in self.heads.items():
            contains = name in ("", module) or module.startswith(f"{name}.")
            if contains and len(name) > longest:
                heads = stated
                longest = len(name)
        return heads


def _are_same(args: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    if len(args) != len(others):
        return False
    return all(one is other for one, other in zip(args, others, strict=True))


def _has_no_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _device_of(call: Call) -> str:
    states = call.states
    if states is None:
        return "cpu"
    return states.device.type

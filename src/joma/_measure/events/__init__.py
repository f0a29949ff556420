"""Events of a running model for observers: passes, modules, attention, MLPs, optimiser steps.

A model is watched without being touched. These modules turn an attention into an event:

    calls.py          Which module runs? Module calls take a detour through joma.
    source.py         Which calls are passes to look at? Passes, and the modules that run in them.
    pass_kinds.py     Is a pass training, validation, generation or tracing?
    running_pass.py   What is remembered from one module of a pass to the next?
    backends/         Which function calls are attention? One class per way to compute it.
    products.py       Which axes of a product are summed, shared, or of one operand alone?
    guard/            Did the module compute this attention? Rows are computed again and compared.
    axes/             Which axes are samples, heads and queries? Values first, then sizes.
    padding/          Which queries are padding? The mask that is applied, and arguments.
    events.py         What are observers given? The events, and the protocol of an observer.
    emitter.py        Which observer wants which event, and what if one fails?

What is refused has a code and a sentence (reasons.py). What is known about an attention, with its
evidence, is the table of `joma.explain` (facts.py).

Besides attention:

    hidden_neurons.py   Which module is given the hidden neurons of an MLP?
    optimiser.py        When does an optimiser step, and at which learning rate?
    finite.py           Which module gave the first number that is not finite?

So that a model computes the same bits with and without joma:

    aside.py            Compute next to a model: no gradients, no autocast, unseen by other modes.
    extra_pass.py       Make an extra pass that training does not notice.
    border.py           Keep joma out of what torch.compile sees.
    module_snapshot.py  Notice modules that are replaced, added or removed in mid-training.
    tensors.py          Tell tensors that can be read from sharded, nested and transformed ones.
"""

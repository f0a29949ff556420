"""Watching a model in training: gauges tied to a loop, phases, alarms.

The loop:

    watch.py        `joma.watch` and `Watch`: what happens at each step. Nothing that goes wrong here
                    is raised into the training: `Watch.step` turns it into one warning.
    options.py      Which options are there, and which combinations are refused?
    inputs.py       Can this model be watched at all?
    schedule.py     When is each gauge due?
    watched.py      What do meters know about the model? Its matrices, its blocks.
    surgery.py      How is a model that was changed in mid-training described?
    attached.py     Is another watch on the same modules?

From a pass to a number:

    passes.py       Which passes since the last step count?
    meters/         Who measures which gauges? One class per group of gauges.
    tally.py        What is kept of the attention of a pass?
    reducers.py     How do values become one number per head?
    sample.py       Which queries are drawn, if only a sample is measured?
    layers.py       Which number has an attention layer?
    order.py        Does attention run between two maps that look like an MLP?
    unseen.py       Which modules should attend, and were not seen doing it?
    probe.py        How is a fixed batch measured instead of the training batches?
    processes.py    How do several processes measure together?
    measurement.py  What are all numbers of one measurement?

From a number to a judgement:

    readings.py       What do phases and alarms look at?
    phases.py         Is attention dense, sparsifying, bouncing, collapsed?
    alarms/           What is wrong? One class per rule.
    applicability.py  Do the premises of the theory hold for this model?
    clock.py          What is τ = Σ lr, and which rates add up to it?

What the user sees:

    record.py       The run folder.
    patterns.py     Stored attention patterns.
    explain.py      `joma.explain`: what joma sees, and how it knows.
    display.py      The line in the terminal, the table in a notebook.
"""

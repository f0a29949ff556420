"""Watching a model in training: gauges tied to a loop, phases, alarms.

What the user calls:

    watch.py           `joma.watch` and `Watch`.
    options.py         Which options are there, and which combinations are refused?
    step_arguments.py  What does the user state about a step?
    inputs.py          Can this model be watched at all?

The loop:

    loop.py         What happens at each step?
    schedule.py     When is each gauge due?
    instruments.py  Which meters are there, and what do they listen to?
    supervisor.py   How do phases and alarms take a measurement, and the losses between two?
    failures.py     How does a failure become a warning instead of an error of the training?
    watched.py      What do meters know about the model? Its matrices, its blocks.
    follower.py     What happens when modules are replaced in mid-training?
    surgery.py      How is such a change described?
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

    run_request.py        Which run folder is written: a new one, or one that is resumed?
    record.py             What is written to it?
    line_files.py         How do lines survive a full disk?
    patterns.py           Stored attention patterns.
    explain.py            `joma.explain`: what joma sees, and how it knows.
    watch_explanation.py  The same for a running watch.
    display.py            The line in the terminal, the table in a notebook.
"""

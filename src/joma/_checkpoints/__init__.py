"""Gauges over a series of checkpoints, or over several models: which ones, what is read, the scan.

Which checkpoints:

    checkpoints.py      Which checkpoints does a source stand for? The steps of one model, or several
                        models that are compared by name: `select_checkpoints` decides.
    revision_choice.py  Which of a series? ``--revisions log:20``.
    steps.py            Which training step does a name stand for?
    hub.py              Which revisions does a model have on the hub?
    options.py          Options that scans, audits and other tools share.

From files to tensors:

    folder.py           Which files of a folder hold the weights?
    revision.py         Where are the files of a revision? In the cache, by ranges, or downloaded.
    formats/            How is a tensor found in a file? One module per format, tensors as views.
    reading.py          How are bytes of a file on this machine read?
    ranges.py           How are bytes of a file on the hub read? Neighbouring ranges are merged.
    tensors.py          All tensors of a checkpoint, whatever it is saved as.
    lora.py             What do adapters add to their base?
    plan.py             Which views does a gauge need?

From tensors to a row:

    scan.py             `joma.scan`.
    row.py              What is asked of each checkpoint, and what answers it?
    measure.py          How is the row of one checkpoint made, and why do gauges have no value?
    weights.py          Gauges on matrices, and on their change.
    charges.py          Gauges on charges.
    sample.py           Gauges that run the model on a sample of tokens.
    model.py            How is a model built from a checkpoint?
    language_model.py   How is a checkpoint of `joma train` read?
    budget.py           How much does a scan transfer?
    numbering.py        Which folder does a scan write to?
    audit/              `joma.audit`: what is wrong with a series.
"""

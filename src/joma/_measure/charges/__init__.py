"""Charges: the conserved quantities of a Transformer's weights, and their laws of motion.

table.py        `joma.charges`: the charges of a model, with a table and the checks.
find.py         Which charges does a model have, and why does it lack one?
anatomy.py      What do charges need to know besides the structure? Rotary embeddings, ties, dropout.
charge.py       What is a charge? Its quantity and its bilinear form.
identity.py     Which identity must the gradients fulfil, and which block violates it?
law.py          How does a charge move in one step of an optimiser?
epsilon.py      What does the ε of a normalisation change?
rounding.py     In which precision were the gradients computed?
by_layer.py     What do gauges of charges receive?
"""

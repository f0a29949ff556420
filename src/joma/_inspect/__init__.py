"""Looking into a model: what fires each neuron (Figure 10), and the angles between tokens at each layer."""

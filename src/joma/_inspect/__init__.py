"""Pattern superposition: which unrelated patterns fire one neuron (Figure 10)."""

"""What can be seen of a running model, as events for observers: attention, the input of each block, MLPs, passes."""

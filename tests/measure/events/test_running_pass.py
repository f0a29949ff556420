"""What a pass remembers from one module to the next."""

import pytest
import torch

from joma._measure.events.running_pass import RunningPass


def write_through_data(mask, content):
    mask.data.copy_(content)


def write_through_numpy(mask, content):
    mask.numpy()[...] = content.numpy()


def write(mask, content):
    mask.copy_(content)


@pytest.mark.parametrize("change", [write, write_through_data, write_through_numpy])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_changed_between_two_layers_is_read_again(change, dtype):
    states = torch.randn(2, 3, 4, 8)  # (B, H, T, d)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    first_key_only = torch.zeros(4, 4, dtype=torch.bool)
    first_key_only[:, 0] = True
    masks = [causal, first_key_only]
    if dtype != torch.bool:
        masks = [torch.zeros(4, 4).masked_fill(~mask, -torch.inf) for mask in masks]
    mask = masks[0].clone()
    running = RunningPass()
    assert running.read_mask(mask, states, states).visible.flatten().tolist() == [1, 2, 3, 4]
    change(mask, masks[1])
    assert running.read_mask(mask, states, states).visible.flatten().tolist() == [1, 1, 1, 1]


def test_layers_that_share_a_mask_read_it_once():
    states = torch.randn(2, 3, 4, 8)
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool).expand(2, 3, 4, 4)
    running = RunningPass()
    assert running.read_mask(mask, states, states) is running.read_mask(mask, states, states)

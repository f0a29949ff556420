"""Parameters are the same to the bit with and without a watch: several processes, generate, Accelerate."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, sharpen

STEPS = 3


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


# Several processes


def train_in_processes(kind: str, watched: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = sharpen(HandWrittenGPT("sdpa", d=32, heads=4, dropout=0.1), 2)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    w = (
        joma.watch(model, every=1, processes="all", optimizer=optimizer, live=False)
        if watched
        else None
    )
    for step in range(STEPS):
        x = batch(2 * step + dist.get_rank())
        loss_of(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if w is not None:
            assert w.step()
    if w is not None:
        w.close()
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach()
        for name, p in model.named_parameters()
    }


def work(rank: int, kind: str, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        plain = train_in_processes(kind, False)
        watched = train_in_processes(kind, True)
        different = [name for name in plain if not torch.equal(plain[name], watched[name])]
        (Path(folder) / str(rank)).write_text(f"{len(plain)} parameters, different: {different}")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_several_processes(kind, tmp_path, fork_server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, args=(kind, port, str(tmp_path)), nprocs=2, start_method="forkserver")
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "27 parameters, different: []"


# One process


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def train_and_generate(watched: bool) -> tuple[nn.Module, list[list[int]], int]:
    """Sample a text before every step."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    texts = []
    w = joma.watch(model, every=1, gauges="entropy", live=False) if watched else None
    for step in range(STEPS):
        model.eval()
        text = model.generate(
            batch(step)[:1, :4], do_sample=True, max_new_tokens=12, min_new_tokens=12
        )
        texts.append(text[0].tolist())
        model.train()
        x = batch(step)
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if w is not None:
            assert len(w.step()) == 2
    if w is not None:
        assert w.problems == []
        w.close()
    return model, texts, int(torch.randint(1 << 30, ()))


def test_generate_in_the_loop():
    plain, plain_texts, plain_draw = train_and_generate(False)
    watched, texts, draw = train_and_generate(True)
    assert texts == plain_texts
    assert draw == plain_draw
    for name, value in watched.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = sharpen(HandWrittenGPT("sdpa", dropout=0.1), 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(3)
        w = joma.watch(model, every=1, optimizer=optimizer, live=False) if watched else None
        for step in range(2 * STEPS):
            x = batch(step)
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), x))
                optimizer.step()
                optimizer.zero_grad()
            if w is not None and accelerator.sync_gradients:
                assert w.step()
        if w is not None:
            w.close()
        states.append(accelerator.unwrap_model(model).state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name

"""Audits of series with planted faults: of tiny models that are really trained, so that healthy means healthy.

    python -m benchmarks.audit             20 seeds × 3 architectures × 7 faults × 3 levels, and healthy series
    python -m benchmarks.audit schedules   seeds × 3 architectures × 4 schedules: healthy, and with every swap there is
    python -m benchmarks.audit hub         154 checkpoints on a local hub by hashes: what is transferred

Each model (3 layers, width 32) is trained with AdamW, warm-up and decay, for 96 steps on a random Markov chain, and
saved in shards at 14 steps, log-spaced at first. A fault counts as found if the audit names a checkpoint that it was
planted in. The rule for the order of checkpoints was made on seeds from 100 on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import joma

ARCHITECTURES = ("gpt_neox", "llama", "gpt2")
STEPS = (0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 60, 72, 84, 96)
WORDS, LENGTH, BATCH = 60, 32, 8
Rate = Callable[[int, int], float]  # the share of the learning rate at a step, of so many


def cosine(step: int, last: int) -> float:
    """Warm-up and decay to a tenth."""
    return min(1.0, (step + 1) / 10) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / last)) / 2)


SCHEDULES: dict[str, tuple[tuple[int, ...], Rate]] = {
    "warm-up and decay": (STEPS, cosine),
    "constant": (tuple(range(0, 97, 8)), lambda step, last: 1.0),
    "log-spaced": ((0, *(2**n for n in range(8))), cosine),
    "decay to nothing": (
        tuple(range(8, 129, 8)),
        lambda step, last: min(1.0, 4 * (1 - step / last)),
    ),
}


def make_series(
    architecture: str, seed: int, folder: Path, steps: tuple[int, ...] = STEPS, rate: Rate = cosine
) -> None:
    """Train a tiny model and save it at these steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from joma._data.pretrained import quiet

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": WORDS}
    if architecture == "gpt2":
        sizes |= {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": LENGTH,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
                  "max_position_embeddings": LENGTH}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    chain = (4 * torch.randn(WORDS, WORDS)).softmax(dim=-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    last = steps[-1]
    for step in range(last + 1):
        if step in steps:
            with quiet():
                model.save_pretrained(folder / f"step-{step}", max_shard_size="20KB")
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step, last)
        tokens = [torch.randint(WORDS, (BATCH,))]
        for _ in range(LENGTH - 1):
            tokens.append(torch.multinomial(chain[tokens[-1]], 1)[:, 0])
        batch = torch.stack(tokens, dim=1)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


Fault = Callable[
    [Path, random.Random], set[str]
]  # plants a fault, returns the checkpoints it is in


def _folders(series: Path) -> list[Path]:
    return sorted(series.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)[
        -6:
    ]  # the larger ones


def duplicate(series: Path, draw: random.Random) -> set[str]:
    """A step has the weights of another."""
    a, b = draw.sample(_folders(series), 2)
    shutil.rmtree(a)
    shutil.copytree(b, a)
    return {a.name, b.name}


def wrong_shard(series: Path, draw: random.Random) -> set[str]:
    """One shard is that of another model of the same shape."""
    folder = draw.choice(_folders(series))
    shard = draw.choice(_shards(folder))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    state = load_file(shard)
    other = {
        n: t[torch.randperm(len(t), generator=generator)].flip(-1) if t.dim() > 1 else t
        for n, t in state.items()
    }
    save_file({n: t.contiguous() for n, t in other.items()}, shard, metadata={"format": "pt"})
    return {folder.name}


def old_shard(series: Path, draw: random.Random) -> set[str]:
    """One shard is that of another step."""
    a, b = draw.sample(_folders(series), 2)
    shard = draw.choice(_shards(a))
    shutil.copyfile(b / shard.name, shard)
    return {a.name, b.name}


def swapped(series: Path, draw: random.Random) -> set[str]:
    """Two steps have each other's weights."""
    a, b = draw.sample(_folders(series), 2)
    swap(a, b)
    return {a.name, b.name}


def swap(a: Path, b: Path) -> None:
    """Let two folders change their names."""
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def not_a_number(series: Path, draw: random.Random) -> set[str]:
    """One number of one tensor is NaN."""
    folder = draw.choice(_folders(series))
    shard = draw.choice(_shards(folder))
    state = load_file(shard)
    tensor = state[draw.choice(sorted(state))]
    tensor.view(-1)[draw.randrange(tensor.numel())] = math.nan
    save_file(state, shard, metadata={"format": "pt"})
    return {folder.name}


def truncated(series: Path, draw: random.Random) -> set[str]:
    """A file is cut off."""
    folder = draw.choice(_folders(series))
    shard = draw.choice(_shards(folder))
    with shard.open("r+b") as stream:
        stream.truncate(int(draw.uniform(0.1, 0.9) * shard.stat().st_size))
    return {folder.name}


def renamed(series: Path, draw: random.Random) -> set[str]:
    """A tensor has another name, in its file and in the index."""
    folder = draw.choice(_folders(series))
    shard = draw.choice(_shards(folder))
    state = load_file(shard)
    name = draw.choice(sorted(state))
    state[f"{name}.old"] = state.pop(name)
    save_file(state, shard, metadata={"format": "pt"})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][f"{name}.old"] = index["weight_map"].pop(name)
    file.write_text(json.dumps(index))
    return {folder.name}


FAULTS: dict[str, Fault] = {
    "duplicate step": duplicate, "shard of another model": wrong_shard, "shard of another step": old_shard,
    "swapped steps": swapped, "one NaN": not_a_number, "truncated file": truncated, "renamed tensor": renamed,
}  # fmt: skip


@contextmanager
def remembered() -> Iterator[None]:
    """Checkpoints that several series share are read once: of a faulty series, that is all but one or two."""
    from joma._checkpoints.audit import audit as module

    real, known = module.gather, dict[tuple[str, str], Any]()

    def gather(checkpoint: Any, level: Any, limit: Any = None) -> Any:
        digest = hashlib.sha256()
        for file in sorted(Path(checkpoint.path).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
        key = digest.hexdigest(), str(level)
        if key not in known:
            known[key] = real(checkpoint, level, limit)
        facts, samples = known[key]
        return replace(
            facts, name=checkpoint.name, step=checkpoint.step, change={}, change2={}
        ), samples

    module.gather = gather
    try:
        yield
    finally:
        module.gather = real


def study(
    seeds: Sequence[int],
    architectures: Sequence[str],
    levels: tuple[str, ...] = ("hashes", "slices", "full"),
) -> dict[str, Any]:
    """Found by fault and level, and false alarms on the healthy series."""
    found = {fault: dict.fromkeys(levels, 0) for fault in FAULTS}
    missed: list[str] = []
    alarms = dict.fromkeys(levels, 0)
    for architecture in architectures:
        for seed in seeds:
            print(architecture, seed, file=sys.stderr, flush=True)
            with remembered(), tempfile.TemporaryDirectory() as place:
                healthy = Path(place) / "healthy"
                make_series(architecture, seed, healthy)
                for level in levels:
                    result = joma.audit(healthy, level=level)
                    alarms[level] += not result.ok
                    missed += [
                        f"false alarm, {architecture} {seed} {level}: {fault.text}"
                        for fault in result.faults
                    ]
                for fault, plant in FAULTS.items():
                    series = Path(place) / "faulty"
                    shutil.copytree(healthy, series)
                    wrong = plant(series, random.Random(f"{architecture} {seed} {fault}"))
                    for level in levels:
                        named = {
                            name
                            for f in joma.audit(series, level=level).faults
                            for name in f.checkpoints
                        }
                        found[fault][level] += bool(named & wrong)
                        missed += [f"{fault} in {sorted(wrong)}, {architecture} {seed} {level}"] * (
                            not named & wrong
                        )
                    shutil.rmtree(series)
    return {
        "series": len(architectures) * len(seeds),
        "found": found,
        "false_alarms": alarms,
        "missed": missed,
    }


def schedules(seeds: Sequence[int], architectures: Sequence[str]) -> dict[str, Any]:
    """Per schedule: healthy series that are accused or not judged, and what becomes of each swap of two steps."""
    results = {}
    for schedule, (steps, rate) in SCHEDULES.items():
        counts: Counter[str] = Counter()
        for architecture, seed in itertools.product(architectures, seeds):
            print(schedule, architecture, seed, file=sys.stderr, flush=True)
            with remembered(), tempfile.TemporaryDirectory() as place:
                series = Path(place) / "series"
                make_series(architecture, seed, series, steps, rate)
                healthy = joma.audit(series)
                counts.update(
                    series=1,
                    accused=int(not healthy.ok),
                    order_unknown=int("comes first" in healthy.not_judged),
                )
                for a, b in itertools.combinations(_folders(series), 2):
                    swap(a, b)
                    faults = joma.audit(series).faults
                    swap(a, b)
                    pairs = [
                        set(fault.checkpoints) for fault in faults if fault.kind == "exchanged"
                    ]
                    named = {name for fault in faults for name in fault.checkpoints}
                    counts.update(swaps=1, found=bool(named & {a.name, b.name}), both={a.name, b.name} in pairs,
                                      others=bool(named - {a.name, b.name}))  # fmt: skip
        results[schedule] = dict(counts)
    return results


def by_hashes(checkpoints: int = 154) -> dict[str, Any]:
    """An audit of so many checkpoints on a local hub, two of them alike, and what it transfers."""
    from benchmarks.ranges import REPO, hub

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_series("gpt_neox", 0, folder / "few")
        sources = _folders(folder / "few")
        revisions = {}
        for n in range(checkpoints):
            target = folder / f"remote/step{n}"
            shutil.copytree(sources[n % len(sources)], target)
            for shard in target.glob("*.safetensors"):  # no two are alike, but for one
                moved = {k: t + (n if n != 77 else 63) for k, t in load_file(shard).items()}
                save_file(moved, shard, metadata={"format": "pt"})
            revisions[target.name] = target
        with hub(revisions, folder / "caches") as server:
            result = joma.audit(REPO, revisions="all", level="hashes")
            weights = [name for name in server.log if name.endswith((".safetensors", ".bin"))]
            return {
                "checkpoints": len(result.checkpoints()), "requests_for_weights": len(weights),
                "bytes_of_files": server.sent, "bytes_of_weights": int(result.checkpoints().bytes.sum()),
                "faults": [fault.text for fault in result.faults],
            }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("study", "schedules", "hub"), default="study")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    arguments = parser.parse_args()
    of = (range(arguments.first, arguments.first + arguments.seeds), arguments.architectures)
    told = {"study": lambda: study(*of), "schedules": lambda: schedules(*of), "hub": by_hashes}[
        arguments.what
    ]()
    print(json.dumps(told, indent=2))

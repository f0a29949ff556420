"""A small GPT-NeoX in training, saved as the public Pythia series is: what fig7, fig10 and embeddings read offline.

The model is trained on an embedded corpus and saved in the hub's format (safetensors, config, tokenizer) at Pythia's
steps 0, 1, 2, 4, …, 512, 1000, 2000, … into folders ``step-N``. The series is kept in joma's cache under the
fingerprint of all that decides it: exhibits that run side by side share it, and one of them trains it while the others
wait. A training that was stopped goes on from its last saved state.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.fingerprint import fingerprint
from joma.paper.exhibits.base import Progress

if TYPE_CHECKING:
    from joma._data.corpora import Corpus

INFO = "series.json"
STATE, SAVE_EVERY = (
    "state.pt",
    100,
)  # what a stopped training goes on from, and steps between two of them
SERIES: dict[str, Any] = {  # about 90 s on one core; the loss falls from 7.0 to 3.9 nats per token
    "data": "pydoc", "vocabulary": 1024, "layers": 4, "d": 128, "heads": 4,
    "batch": 8, "length": 64, "steps": 1000, "lr": 1e-3, "warmup": 100,
}  # fmt: skip


# A tiny one of four steps, for spot checks: computed in a second on every machine.
TINY_SERIES: dict[str, Any] = {
    "data": "zipf",
    "vocabulary": 300,
    "layers": 2,
    "d": 32,
    "heads": 2,
    "batch": 4,
    "length": 32,
    "steps": 4,
    "lr": 1e-2,
    "warmup": 2,
}


def saved_steps(last: int) -> list[int]:
    """Pythia's steps up to ``last``, and ``last`` itself.

    >>> saved_steps(2500)[-4:]
    [512, 1000, 2000, 2500]
    """
    from joma._checkpoints.revision_choice import pythia_steps

    return sorted({*(step for step in pythia_steps() if step <= last), last})


def series(settings: dict[str, Any], seed: int, progress: Progress) -> Path:
    """The folder with ``step-N/`` for Pythia's steps, from the cache or trained now; ``series.json`` has the losses.

    Arguments:
        settings: as `SERIES`; keys that are missing are taken from there.
        seed: of the weights; batches are consecutive windows of the corpus.
        progress: called with the share done, and what is being done.
    """
    from joma._data.cache import entry
    from joma._data.corpora import corpus
    from joma._data.folders import cache_folder

    if unknown := settings.keys() - SERIES.keys():
        raise ValueError(
            f"unknown settings of the series: {', '.join(sorted(unknown))}; there are {', '.join(SERIES)}"
        )
    settings = SERIES | settings
    progress(0.0, "a small GPT-NeoX: trained once, or waited for")
    text = corpus(settings["data"], tokeniser="bpe", vocabulary=settings["vocabulary"])
    digest = fingerprint([__name__], {"seed": seed, "corpus": text.digest, **settings})
    path = cache_folder() / "series" / digest

    def fill(folder: Path) -> None:
        under_way = path.with_name(f".{digest}.training")  # stays if the training is stopped
        under_way.mkdir(parents=True, exist_ok=True)
        _train(under_way, text, settings, seed, progress)
        (under_way / STATE).unlink(missing_ok=True)
        for part in under_way.iterdir():
            part.rename(folder / part.name)
        under_way.rmdir()

    return entry(path, _complete, fill)


def losses(folder: Path) -> dict[int, float]:
    """Step -> validation loss in nats per token, of a series."""
    return {
        int(step): loss
        for step, loss in json.loads((folder / INFO).read_text())["valid_loss"].items()
    }


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> its folder, in order."""
    return {step: folder / f"step-{step}" for step in losses(folder)}


def _complete(folder: Path) -> Path | None:
    """The folder if all of a series is in it."""
    try:
        weights = [path / "model.safetensors" for path in checkpoints(folder).values()]
        return folder if all(path.stat().st_size for path in weights) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _train(
    folder: Path, text: Corpus, settings: dict[str, Any], seed: int, progress: Progress
) -> None:
    import numpy as np
    import torch

    from joma._data.pretrained import quiet
    from joma._data.tokens import BytePairs
    from joma._runs import write_json
    from joma._train.windows import epoch, streams, window

    try:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            f"a GPT-NeoX in the hub's format needs transformers ({error}): pip install 'joma[hf]'"
        ) from error

    assert isinstance(text.tokeniser, BytePairs)
    batch, length, steps = settings["batch"], settings["length"], settings["steps"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.tokeniser.tokenizer)
    config = GPTNeoXConfig(
        vocab_size=text.size, hidden_size=settings["d"], num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"], intermediate_size=4 * settings["d"], max_position_embeddings=512,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # as Pythia: a linear start, then a cosine down to a tenth
        lambda n: float(
            min(
                (n + 1) / settings["warmup"], 0.1 + 0.45 * (1 + np.cos(np.pi * min(n / steps, 1.0)))
            )
        ),
    )
    train, valid = streams(text.train, batch), streams(text.valid, batch)
    held_out = [window(valid, n, length) for n in range(min(4, epoch(valid, length)))]

    def loss(pair: Any) -> Any:
        inputs, targets = (torch.from_numpy(x) for x in pair)
        logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    wanted, valid_loss, latest = set(saved_steps(steps)), {}, float("nan")
    first, parts = 0, {"model": model, "optimizer": optimizer, "schedule": schedule}
    if (state := _saved_state(folder / STATE)) is not None:
        first, valid_loss, latest = state["step"], state["valid_loss"], state["latest"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for step in range(first, steps + 1):
        if step % SAVE_EVERY == 0 and step > first:
            facts = {"step": step, "valid_loss": valid_loss, "latest": latest}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(facts | states, folder / f"{STATE}.new")
            (folder / f"{STATE}.new").replace(folder / STATE)
        if step in wanted:
            with torch.no_grad():
                latest = float(np.mean([float(loss(pair)) for pair in held_out]))
            valid_loss[step] = latest
            with quiet():
                model.save_pretrained(folder / f"step-{step}")
                tokenizer.save_pretrained(folder / f"step-{step}")
        if step < steps:
            if step % 10 == 0:
                progress(
                    step / steps,
                    f"training a small GPT-NeoX: step {step} of {steps}, loss {latest:.2f}",
                )
            loss(window(train, step, length)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    write_json(folder / INFO, {"settings": settings, "seed": seed, "valid_loss": valid_loss})


def _saved_state(path: Path) -> dict[str, Any] | None:
    """What a stopped training left; None if it left nothing that can be read."""
    import torch

    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        return None


def located(model: str, revision: str | None = None) -> tuple[str, str | None]:
    """A public model as (folder or id, revision): a folder of its name in ``$JOMA_MODELS``, else the hub.

    A model in a package has no revisions. That the package is missing, or has other weights than those that joma
    knows, is said here, before anything is trained.
    ``$JOMA_MODELS/pythia-70m/step1000`` is a revision, ``$JOMA_MODELS/pythia-70m`` the model as it is now.
    """
    from joma._data.packaged import verified_models

    if verified_models(model):
        return model, None
    if models := os.environ.get("JOMA_MODELS"):
        folder = Path(models).expanduser() / model.rpartition("/")[2] / (revision or "")
        if folder.is_dir():
            return str(folder), None
    return model, revision


def reads_reactions(model: str) -> bool:
    """True for the packaged models of chemical reactions; they see all tokens of a reaction at once."""
    return model.partition("/")[0] in ("rxnfp", "rxnmapper")


def read_by(model: str, settings: dict[str, Any], seed: int) -> Any:
    """What a model reads: the corpus of the settings, or token ids of made reactions, (reactions, reaction_length)."""
    if not reads_reactions(model):
        return settings["data"]
    from joma._data.packaged import packaged
    from joma.paper.labs.reactions import reaction_ids

    folder = packaged(model)
    assert folder is not None
    vocabulary = (folder / "vocab.txt").read_text().split()
    return reaction_ids(vocabulary, settings["reaction_length"], settings["reactions"], seed)


def first_layers(model: str, revision: str | None, count: int) -> tuple[Any, Any]:
    """Return a model that ends after its first layers, and its tokenizer.

    What goes into these layers is what goes into them in the whole model.
    """
    from joma._checkpoints.options import CheckpointOptions
    from joma._inspect.windows import open_model

    reads_text = CheckpointOptions(data="zipf")
    opened: tuple[Any, Any] = open_model(model, reads_text, revision)
    net, tokenizer = opened
    net.layers = net.layers[:count]
    net.config.num_hidden_layers = count
    return net, tokenizer

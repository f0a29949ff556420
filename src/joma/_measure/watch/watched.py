"""The model of a watch as its meters see it: its matrices, its blocks, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from joma._measure.events.module_snapshot import ModuleSnapshot
from joma._measure.events.padding import StatedPadding
from joma._measure.gauges.kinds import WEIGHT
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.inputs import find_part_matrices
from joma._measure.watch.layers import LayerNumbering
from joma._measure.watch.order import CallOrder
from joma._measure.watch.processes import Processes
from joma._measure.watch.sample import Sampler
from joma._measure.watch.schedule import Every
from joma._measure.watch.surgery import describe_matrices, describe_modules, shorten
from joma.models.blocks import Blocks
from joma.models.matrices import Matrix
from joma.models.parts import PARTS
from joma.models.structure import find as find_structure


class WatchedModel:
    """A model with the gauges that are measured on it.

    Arguments:
        model: the model.
        gauges: all gauges that were asked for.
        processes: those that are measured together.
        mlp: the lower MLP matrices, if the user names them.
        is_lenient: True to leave out gauges of matrices that the model does not have.
        optimizers: that train the model.
        periods: gauge -> its schedule.
        padding: which tokens are real, if the user states it.
        sampler: draws the queries that are measured; None to measure all.

    Attributes:
        gauges: those that can be measured on the model.
        periods: gauge -> its schedule, of these gauges.
        matrices: part -> the matrices that weight gauges are measured on.
        blocks: the one numbering of blocks.
        layers: the numbering of attention layers.
        order: finds matrices that were taken for an MLP, and have attention between them.
    """

    def __init__(
        self,
        model: nn.Module,
        gauges: Sequence[Gauge],
        processes: Processes,
        *,
        mlp: str | Sequence[str] | None = None,
        is_lenient: bool = False,
        optimizers: Sequence[Optimizer] = (),
        periods: Mapping[str, Every] | None = None,
        padding: StatedPadding | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.model = model
        self.processes = processes
        self.optimizers = list(optimizers)
        self.padding = padding
        self.sampler = sampler
        self._mlp = mlp
        self.matrices = self._find_matrices(gauges, is_lenient=is_lenient)
        self.gauges = []
        for gauge in gauges:
            if gauge.kind is not WEIGHT or gauge.part in self.matrices:
                self.gauges.append(gauge)
        self.periods: dict[str, Every] = {}
        if periods is not None:
            self.periods = {gauge.name: periods[gauge.name] for gauge in self.gauges}
        self.blocks = Blocks(model)
        self.layers = LayerNumbering()
        self.order = CallOrder(self._uncertain_pairs())
        self._structure = ModuleSnapshot(model)

    def _find_matrices(
        self, gauges: Sequence[Gauge], *, is_lenient: bool
    ) -> dict[str, list[Matrix]]:
        refusal = self.processes.cannot_gather
        return find_part_matrices(
            self.model, gauges, self._mlp, lenient=is_lenient, refusal=refusal
        )

    def _uncertain_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of maps that only a pass can show to be no MLP."""
        if self._mlp is not None or not self.matrices:
            return []
        return find_structure(self.model).unnamed_pairs

    @property
    def matrix_names(self) -> dict[str, list[str]]:
        """Part -> the names of its matrices."""
        names = {}
        for part, matrices in self.matrices.items():
            names[part] = [matrix.name for matrix in matrices]
        return names

    def describe_matrices(self) -> str:
        """Return which matrices weight gauges are measured on, in one line; "" if there are none."""
        parts = []
        for part, names in self.matrix_names.items():
            title = PARTS.get(part, part).partition(":")[0]
            parts.append(f"{title}: {shorten(names)}")
        if not parts:
            return ""
        return f"joma measures {'; '.join(parts)}"

    # What a pass shows

    def leave_out_projections(self) -> dict[str, str]:
        """Drop matrices that were taken for an MLP, and have attention between its two maps.

        Returns:
            The lower map of each -> a sentence; empty if there is nothing to drop any more.
        """
        around = self.order.around
        dropped = set(around)
        for upper, _ in around.values():
            dropped.add(upper)
        has_changed = False
        for part, matrices in self.matrices.items():
            if part.startswith("mlp"):
                left = [matrix for matrix in matrices if _module_of(matrix) not in dropped]
                has_changed |= len(left) < len(matrices)
                self.matrices[part] = left
        if not has_changed:
            return {}
        sentences = {}
        for lower, (upper, module) in around.items():
            sentences[lower] = (
                f"{lower} is not the lower matrix of an MLP: in {module}, attention is computed "
                f"between it and {upper}. It is not measured; if there is another, name it with "
                "mlp=[…]"
            )
        return sentences

    # A model that is changed in mid-training

    @property
    def names(self) -> Mapping[nn.Module, str]:
        """Module -> its name."""
        return self._structure.names

    def has_changed(self) -> bool:
        """True if modules or parameters were added, removed or replaced since the last look."""
        return self._structure.has_changed()

    def take_structure(self) -> Mapping[nn.Module, str]:
        """Look at the modules again; return the names before."""
        before = self._structure.names
        self._structure.take()
        return before

    def renew(self, names_before: Mapping[nn.Module, str], when: str) -> list[str]:
        """Find blocks, layers and matrices again; return what changed, in words.

        Arguments:
            names_before: what `take_structure` returned.
            when: in words, for the names of layers that are gone.
        """
        matrices_before = self.matrices
        self.blocks.renew(self.model, when)
        self.layers.rename(self._structure.renamed(names_before), when)
        gauges = [gauge for gauge in self.gauges if gauge.part in matrices_before]
        self.matrices = self._find_matrices(gauges, is_lenient=True)
        self.order.pairs = self._uncertain_pairs()
        self.order.around.clear()
        changes = describe_modules(names_before, self.names)
        return changes + describe_matrices(matrices_before, self.matrices)


def _module_of(matrix: Matrix) -> str:
    """Return the module of a matrix, whose name may go on with a number or a remark."""
    return matrix.name.partition("[")[0].partition(" ")[0]

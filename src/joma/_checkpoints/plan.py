"""Which tensors of a checkpoint, or which parts of them, hold the matrices that gauges are measured on.

With a `config.json` that transformers knows, the model is built on the meta device, its matrices are found as a watch
finds them, and each view is traced back to the tensor of the file. Otherwise a skeleton of linear maps is built from
the names and shapes of the tensors, and the same search is made on that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from joma._checkpoints.entry import Entry, contiguous
from joma._checkpoints.formats import quantised
from joma._checkpoints.model import model_of
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma.models.matrices import Matrix
from joma.models.names import natural_order
from joma.models.parts import PARTS, PRODUCTS, UPDATE
from joma.models.skeleton import BadTensorName, skeleton
from joma.models.structure import find

# families of which the model itself tells nothing else: it is not built, since transformers takes seconds to import
_USUAL = ("bert", "gpt2", "gpt_neox", "llama", "opt")
_SCALES = ("_scale", "_scale_inv", "_scales")


@dataclass(frozen=True)
class Piece:
    """A view of a tensor in the file: as in ``as_strided``, on the tensor as a contiguous one."""

    tensor: str
    shape: tuple[int, ...]  # of the full tensor
    view: tuple[tuple[int, ...], tuple[int, ...], int]  # shape, stride, start

    def read(self, tensors: Tensors) -> Tensor:
        """The view, from the file, in float32."""
        entry = tensors.entry(self.tensor)
        if not entry.dtype.is_floating_point:
            why = quantised(tensors.config, tensors.names) or "quantised weights cannot be measured"
            raise BadCheckpoint(f"{self.tensor} is of type {entry.stored or entry.dtype}: {why}")
        if entry.dtype.itemsize == 1 and (
            scale := next((n for s in _SCALES if (n := self.tensor + s) in tensors), "")
        ):
            why = quantised(tensors.config, tensors.names) or "it cannot be measured without them"
            raise BadCheckpoint(f"{self.tensor} is quantised with scales ({scale}): {why}")
        if entry.shape != self.shape:
            raise BadCheckpoint(
                f"{self.tensor} has shape {entry.shape}, which does not fit: {self.shape} is expected (by "
                "config.json, or by the checkpoints before it)"
            )
        return tensors.read(self.tensor, self.part(tensors))

    def part(self, tensors: Tensors) -> Entry | None:
        """Where the view is in the file, None if it is the whole tensor."""
        entry, (shape, stride, start) = tensors.entry(self.tensor), self.view
        is_full = shape == entry.shape and start == 0 and stride == contiguous(shape)
        return None if is_full else entry.view(shape, stride, start)


@dataclass(frozen=True, eq=False)
class Planned:
    """One matrix: what to read, and what to make of it."""

    name: str
    pieces: tuple[Piece, ...]
    finish: Callable[[list[Tensor]], list[Tensor]]
    heads: int
    update: bool = False  # read what an adapter adds

    def read(self, tensors: Tensors) -> list[Tensor]:
        """One matrix, or one per head."""
        return self.finish([piece.read(self.source(tensors)) for piece in self.pieces])

    def source(self, tensors: Tensors) -> Tensors:
        """Which tensors of a checkpoint it is read from."""
        return tensors.updates if self.update and tensors.updates is not None else tensors


class Plan(dict[str, list[Planned]]):
    """Part -> matrices by layer.

    Attributes:
        missing: part -> why the checkpoint has no such matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[str, str] = {}

    def add(self, part: str, find: Callable[[], list[Planned]]) -> None:
        """Add the matrices that ``find`` returns, or the reason why there are none."""
        try:
            self[part] = find()
        except MissingPart as error:
            self.missing[part] = str(error)


class MissingPart(BadCheckpoint):
    """The checkpoint does not have the matrices of a part; it may have those of others."""


class NoMatrices(BadCheckpoint):
    """The checkpoint has none of the parts that were asked for; ``missing``: part -> the reason."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(missing.values())))
        self.missing = dict(missing)


def plan(tensors: Tensors, parts: Iterable[str], mlp: str | None = None) -> Plan:
    """Find the matrices of each part.

    A part that the checkpoint does not have is in `Plan.missing`; if it has none, that is an error.
    """
    parts = list(dict.fromkeys(parts))
    try:
        result = _plan(tensors, parts, mlp)
        if parts and not result:
            raise NoMatrices(result.missing)
    except BadCheckpoint:
        if (why := quantised(tensors.config, tensors.names)) is not None:
            raise NoMatrices(dict.fromkeys(parts, why)) from None
        raise
    if result.missing and (why := quantised(tensors.config, tensors.names)) is not None:
        result.missing = dict.fromkeys(result.missing, why)
    return result


def _plan(tensors: Tensors, parts: list[str], mlp: str | None) -> Plan:
    if any(".lora_" in name for name in tensors.names):
        raise BadCheckpoint(
            "it has LoRA matrices beside the weights: save model.merge_and_unload() and scan that"
        )
    result = Plan()
    rest = [part for part in parts if not part.endswith(UPDATE)]
    for part in (part for part in parts if part.endswith(UPDATE)):
        result.add(part, partial(_update, tensors, part, mlp))
    if rest and tensors.incomplete:
        result.missing |= dict.fromkeys(rest, tensors.incomplete)
        return result
    if "mlp_in" in rest and mlp is not None:
        rest.remove("mlp_in")
        result.add("mlp_in", partial(_by_names, tensors, mlp))
    if rest:
        search = _Search(tensors, rest)
        for part in rest:
            result.add(part, partial(search.matrices, part))
    return result


class _Search:
    """Finds matrices: by names and shapes, in the model, or in a skeleton of the file."""

    def __init__(self, tensors: Tensors, parts: list[str]) -> None:
        self._tensors = tensors
        self._usual = _usual(tensors, parts)
        self._model: nn.Module | None = None
        self._skeleton: nn.Module | None = None
        if self._usual is None:
            self._model = model_of(tensors.config, len(tensors.names))

    def matrices(self, part: str) -> list[Planned]:
        """Return the matrices of a part, or raise `MissingPart`."""
        if self._usual is not None:
            return self._usual[part]
        matrices = None
        if self._model is not None:
            matrices = _traced(find(self._model).matrices(part), self._model, self._tensors)
        if not matrices:
            if self._skeleton is None:
                self._skeleton = _skeleton(self._tensors)
            matrices = _traced(find(self._skeleton).matrices(part), self._skeleton, self._tensors)
        if not matrices:
            raise MissingPart(_not_found(part, len(self._tensors.names)))
        return matrices


def _not_found(part: str, count: int) -> str:
    """Say that a part is not among so many tensors, and what would help."""
    text = f"no matrix found for {part!r} ({PARTS[part]}) among {count} tensors"
    if part == "mlp_in":
        text += "; name them with --mlp REGEX (mlp= in Python)"
    if part in ("q", "k", "v", *PRODUCTS):
        text += "; heads, and fused projections, need a config.json of a family that is known"
    return text


def _usual(tensors: Tensors, parts: list[str]) -> Plan | None:
    """The plan of a checkpoint of a usual family by names and shapes, if they are as its config says, else None."""
    config = tensors.config or {}
    if config.get("model_type") not in _USUAL:
        return None
    layers, width = (
        config.get("num_hidden_layers", config.get("n_layer")),
        config.get("hidden_size", config.get("n_embd")),
    )
    inner = next(
        (config[key] for key in ("ffn_dim", "n_inner", "intermediate_size") if config.get(key)),
        None,
    )
    sizes = {"mlp_in": {inner, width}, "mlp_out": {inner, width}}
    skeleton, matrices_by_part = _skeleton(tensors), Plan()
    structure = find(skeleton)
    for part in parts:
        matrices = _traced(structure.matrices(part), skeleton, tensors) or []
        shapes = [set(piece.shape) for matrix in matrices for piece in matrix.pieces]
        if len(matrices) != layers or not all(
            sizes.get(part, {width}) <= shape for shape in shapes
        ):
            return None
        matrices_by_part[part] = matrices
    return matrices_by_part


def _update(tensors: Tensors, part: str, mlp: str | None) -> list[Planned]:
    """Find what an adapter adds to the matrices of a part; to those of them that it adds to."""
    updates = tensors.updates
    if updates is None:
        raise MissingPart(f"there is no LoRA adapter, whose updates {part!r} would be measured on")
    whole = part.removesuffix(UPDATE)
    try:
        base = plan(updates if tensors.incomplete else tensors, [whole], mlp)[whole]
    except NoMatrices as error:
        raise MissingPart(str(error)) from error
    chosen = [m for m in base if all(piece.tensor in updates for piece in m.pieces)]
    if not chosen:
        raise MissingPart(f"the adapter adds nothing to {whole!r} ({PARTS[whole]})")
    return [replace(m, name=f"{m.name} (update)", update=True) for m in chosen]


def _traced(matrices: Sequence[Matrix], model: nn.Module, tensors: Tensors) -> list[Planned] | None:
    """Where the matrices' views lie in the file; None if the file calls nothing as the model does."""
    match = matcher(tensors.names)
    owners = {p.untyped_storage()._cdata: (name, p) for name, p in model.named_parameters()}
    planned, missing, stacks = [], [], 0
    for matrix in matrices:
        with torch.no_grad():
            views = matrix.views()
        pieces = []
        for view in views:
            name, parameter = owners[view.untyped_storage()._cdata]
            if (tensor := match(name)) is None:
                missing.append(name)
                stacks += parameter.dim() == 3
                continue
            place = (tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))
            pieces.append(Piece(tensor, tuple(parameter.shape), place))
        planned.append(Planned(matrix.name, tuple(pieces), matrix.finish, matrix.heads))
    if missing and stacks == len(missing):  # experts that the file has one by one
        return None
    if missing and len(missing) < sum(len(p.pieces) for p in planned) + len(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingPart(f"the tensor {missing[0]}{more} is missing")
    return None if missing else planned


def matcher(names: Sequence[str]) -> Callable[[str], str | None]:
    """Model's name -> file's name, which may have more in front (`gpt_neox.`, `model.`) or less."""
    known = set(names)
    shorter: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for n in range(1, min(4, len(parts))):
            shorter.setdefault(".".join(parts[n:]), []).append(name)

    def match(name: str) -> str | None:
        parts = name.split(".")
        candidates = [".".join(parts[n:]) for n in range(min(4, len(parts)))]
        if direct := next((c for c in candidates if c in known), None):
            return direct
        longer = shorter.get(name, [])
        return longer[0] if len(longer) == 1 else None

    return match


def _by_names(tensors: Tensors, mlp: str) -> list[Planned]:
    """The tensors whose names (with or without ``.weight``) match; a stack of matrices gives one row per matrix."""
    expression = re.compile(mlp)
    chosen = [
        n
        for n in tensors.names
        if expression.fullmatch(n) or expression.fullmatch(n.removesuffix(".weight"))
    ]
    planned = []
    for name in sorted(chosen, key=natural_order):
        shape = tensors.entry(name).shape
        if len(shape) < 2:
            continue
        stack, matrix = torch.Size(shape[:-2]).numel(), shape[-2:]
        for n in range(stack):
            start = n * matrix[0] * matrix[1]
            piece = Piece(name, shape, (matrix, contiguous(matrix), start))
            title = name.removesuffix(".weight") + (f"[{n}]" if len(shape) > 2 else "")
            planned.append(Planned(title, (piece,), lambda views: views, 1))
    if not planned:
        some = ", ".join(sorted(tensors.names, key=natural_order)[:8])
        raise MissingPart(
            f"no matrix has a name that {mlp!r} matches as a whole; there are {some}, …"
        )
    return planned


def _skeleton(tensors: Tensors) -> nn.Module:
    """Build the modules that the names and shapes of a file show."""
    try:
        return skeleton(tensors.names, lambda name: tensors.entry(name).shape, tensors.config)
    except BadTensorName as error:
        raise BadCheckpoint(str(error)) from None

"""The matrices that gauges are measured on, as views of the tensors of a checkpoint.

With a `config.json` that transformers knows, the model is built on the meta device, its matrices
are found as a watch finds them, and each view is traced back to the tensor of the file. Otherwise a
skeleton of linear maps is built from the names and shapes of the tensors, and searched in the same
way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from joma._checkpoints.formats.view import TensorView, contiguous_stride
from joma._checkpoints.model import model_of, quantization_problem
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma.models.matrices import Matrix
from joma.models.names import natural_order
from joma.models.parts import PARTS, PRODUCTS, UPDATE
from joma.models.skeleton import BadTensorName, skeleton
from joma.models.structure import find

# Families whose names and shapes tell as much as the model does. The model is not built for them:
# to import transformers takes seconds.
_USUAL_FAMILIES = ("bert", "gpt2", "gpt_neox", "llama", "opt")
# Numbers of one byte mean nothing without their scales, which lie next to them under such names.
_SCALE_SUFFIXES = ("_scale", "_scale_inv", "_scales")
# A file may have up to three parts more, or fewer, in front of a name than the model has: `model.`,
# `gpt_neox.`, `module.model.`.
_MAX_PREFIX_PARTS = 3


@dataclass(frozen=True)
class ParameterSlice:
    """A view of a parameter, by the name that its tensor has in the files.

    It belongs to no checkpoint: those of a series share one plan. `view` finds it in one of them.
    """

    tensor: str
    tensor_shape: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...]) -> ParameterSlice:
        """Return the slice that is all of a parameter."""
        return cls(tensor, shape, shape, contiguous_stride(shape), 0)

    def view(self, tensors: Tensors) -> TensorView:
        """Return the slice as a view of a checkpoint's tensor."""
        return tensors.view(self.tensor).part(self.shape, self.stride, self.offset)

    def fits(self, tensors: Tensors) -> bool:
        """True if a checkpoint has a tensor of this name and shape, or its file cannot be opened."""
        if self.tensor not in tensors:
            return False
        try:
            view = tensors.view(self.tensor)
        except BadCheckpoint:
            # A damaged shard costs its own matrices only: each of them reports it when it is read.
            return True
        return view.shape == self.tensor_shape

    def check(self, tensors: Tensors) -> None:
        """Raise `BadCheckpoint` if the numbers cannot be measured as they are stored."""
        view = tensors.view(self.tensor)
        if not view.dtype.is_floating_point:
            type_name = view.foreign_type or view.dtype
            reason = quantization_problem(tensors.config, tensors.names())
            reason = reason or "quantised weights cannot be measured"
            raise BadCheckpoint(f"{self.tensor} is of type {type_name}: {reason}")
        if view.dtype.itemsize == 1:
            self._check_scales(tensors)
        if view.shape != self.tensor_shape:
            raise BadCheckpoint(
                f"{self.tensor} has shape {view.shape}, which does not fit: {self.tensor_shape} is "
                "expected (by config.json, or by the checkpoints before it)"
            )

    def _check_scales(self, tensors: Tensors) -> None:
        for suffix in _SCALE_SUFFIXES:
            scales = self.tensor + suffix
            if scales in tensors:
                reason = quantization_problem(tensors.config, tensors.names())
                reason = reason or "it cannot be measured without them"
                raise BadCheckpoint(f"{self.tensor} is quantised with scales ({scales}): {reason}")


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix of a model in the files of its checkpoints: what to read, and what to make of it."""

    name: str
    slices: tuple[ParameterSlice, ...]
    finish: Callable[[list[Tensor]], list[Tensor]]
    heads: int
    is_update: bool = False  # read what an adapter adds, not the weights

    def source(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a checkpoint that it is read from."""
        if self.is_update and tensors.updates is not None:
            return tensors.updates
        return tensors

    def views(self, tensors: Tensors) -> list[TensorView]:
        """Return what will be read."""
        source = self.source(tensors)
        return [slice_.view(source) for slice_ in self.slices]

    def fits(self, tensors: Tensors) -> bool:
        """True if a checkpoint has all tensors of this matrix, with the same shapes."""
        source = self.source(tensors)
        return all(slice_.fits(source) for slice_ in self.slices)

    def read(self, tensors: Tensors) -> list[Tensor]:
        """Return the matrix in float32, or one matrix per head."""
        source = self.source(tensors)
        for slice_ in self.slices:
            slice_.check(source)
        return self.finish(list(source.read_many(self.views(tensors))))


class Plan(dict[str, list[StoredMatrix]]):
    """Part -> its matrices by layer.

    Attributes:
        missing: part -> why the checkpoint has no such matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[str, str] = {}

    def add(self, part: str, find: Callable[[], list[StoredMatrix]]) -> None:
        """Add the matrices that ``find`` returns, or the reason why there are none."""
        try:
            self[part] = find()
        except MissingPart as error:
            self.missing[part] = str(error)

    def matrices(self) -> list[StoredMatrix]:
        """Return the matrices of all parts."""
        return [matrix for matrices in self.values() for matrix in matrices]

    def fits(self, tensors: Tensors) -> bool:
        """True if another checkpoint has the same tensors, so that it can be read by this plan."""
        return all(matrix.fits(tensors) for matrix in self.matrices())

    def views(self, tensors: Tensors) -> list[TensorView]:
        """Return all views that will be read of a checkpoint, each once; updates are not in it."""
        views: dict[TensorView, None] = {}
        for matrix in self.matrices():
            if not matrix.is_update:
                views |= dict.fromkeys(matrix.views(tensors))
        return list(views)


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

    Arguments:
        tensors: of the checkpoint.
        parts: names of `joma.models.parts.PARTS`.
        mlp: a regular expression that the names of the lower MLP matrices match as a whole.
    """
    parts = list(dict.fromkeys(parts))
    problem = partial(quantization_problem, tensors.config, tensors.names())
    # Quantised weights fail in many ways, at names, types or shapes. The reason is always the same.
    try:
        result = _plan(tensors, parts, mlp)
        if parts and not result:
            raise NoMatrices(result.missing)
    except BadCheckpoint:
        reason = problem()
        if reason is not None:
            raise NoMatrices(dict.fromkeys(parts, reason)) from None
        raise
    if result.missing:
        reason = problem()
        if reason is not None:
            result.missing = dict.fromkeys(result.missing, reason)
    return result


def _plan(tensors: Tensors, parts: list[str], mlp: str | None) -> Plan:
    if any(".lora_" in name for name in tensors.names()):
        raise BadCheckpoint(
            "it has LoRA matrices beside the weights: save model.merge_and_unload() and scan that"
        )
    result = Plan()
    weight_parts = []
    for part in parts:
        if part.endswith(UPDATE):
            result.add(part, partial(_update_matrices, tensors, part, mlp))
        else:
            weight_parts.append(part)
    if weight_parts and tensors.incomplete:
        result.missing |= dict.fromkeys(weight_parts, tensors.incomplete)
        return result
    # The user knows better than any finder.
    if "mlp_in" in weight_parts and mlp is not None:
        weight_parts.remove("mlp_in")
        result.add("mlp_in", partial(_named_matrices, tensors, mlp))
    if weight_parts:
        search = _Search(tensors, weight_parts)
        for part in weight_parts:
            result.add(part, partial(search.matrices, part))
    return result


class _Search:
    """Finds matrices: by names and shapes, in the model, or in a skeleton of the file."""

    def __init__(self, tensors: Tensors, parts: list[str]) -> None:
        self._tensors = tensors
        self._usual = _usual_plan(tensors, parts)
        self._model: nn.Module | None = None
        self._skeleton: nn.Module | None = None
        if self._usual is None:
            self._model = model_of(tensors.config, len(tensors.names()))

    def matrices(self, part: str) -> list[StoredMatrix]:
        """Return the matrices of a part, or raise `MissingPart`."""
        if self._usual is not None:
            return self._usual[part]
        matrices = None
        if self._model is not None:
            matrices = _trace(find(self._model).matrices(part), self._model, self._tensors)
        # The model of this version of transformers may have other names than the file.
        if not matrices:
            if self._skeleton is None:
                self._skeleton = _skeleton(self._tensors)
            matrices = _trace(find(self._skeleton).matrices(part), self._skeleton, self._tensors)
        if not matrices:
            raise MissingPart(_not_found(part, len(self._tensors.names())))
        return matrices


def _not_found(part: str, count: int) -> str:
    """Return that a part is not among so many tensors, and what would help."""
    text = f"no matrix found for {part!r} ({PARTS[part]}) among {count} tensors"
    if part == "mlp_in":
        text += "; name them with --mlp REGEX (mlp= in Python)"
    if part in ("q", "k", "v", *PRODUCTS):
        text += "; heads, and fused projections, need a config.json of a family that is known"
    return text


def _usual_plan(tensors: Tensors, parts: list[str]) -> Plan | None:
    """Return the plan for a usual family by names and shapes; None if its config disagrees."""
    config = tensors.config or {}
    if config.get("model_type") not in _USUAL_FAMILIES:
        return None
    layer_count = config.get("num_hidden_layers", config.get("n_layer"))
    width = config.get("hidden_size", config.get("n_embd"))
    inner_width = None
    for key in ("ffn_dim", "n_inner", "intermediate_size"):
        inner_width = inner_width or config.get(key) or None
    model = _skeleton(tensors)
    structure = find(model)
    result = Plan()
    for part in parts:
        expected_sizes = {width}
        if part in ("mlp_in", "mlp_out"):
            expected_sizes = {inner_width, width}
        # A layer that the finder has missed, or a width other than the config's, shows that names
        # and shapes do not suffice for this file.
        matrices = _trace(structure.matrices(part), model, tensors) or []
        if len(matrices) != layer_count:
            return None
        for matrix in matrices:
            for slice_ in matrix.slices:
                if not expected_sizes <= set(slice_.tensor_shape):
                    return None
        result[part] = matrices
    return result


def _update_matrices(tensors: Tensors, part: str, mlp: str | None) -> list[StoredMatrix]:
    """Return what an adapter adds to the matrices of a part, for those that it adds to."""
    updates = tensors.updates
    if updates is None:
        raise MissingPart(f"there is no LoRA adapter, whose updates {part!r} would be measured on")
    weight_part = part.removesuffix(UPDATE)
    try:
        # Without its base, an adapter has nothing but updates to find the matrices in.
        searched = tensors
        if tensors.incomplete:
            searched = updates
        planned = plan(searched, [weight_part], mlp)
    except NoMatrices as error:
        raise MissingPart(str(error)) from error
    matrices = []
    for matrix in planned[weight_part]:
        if all(slice_.tensor in updates for slice_ in matrix.slices):
            matrices.append(replace(matrix, name=f"{matrix.name} (update)", is_update=True))
    if not matrices:
        raise MissingPart(f"the adapter adds nothing to {weight_part!r} ({PARTS[weight_part]})")
    return matrices


def _trace(
    matrices: Sequence[Matrix], model: nn.Module, tensors: Tensors
) -> list[StoredMatrix] | None:
    """Find the views of matrices in the file; None if the file has none of the model's names."""
    match = matcher(tensors.names())
    # A view knows the storage that it looks at, and each parameter has a storage of its own.
    owners = {}
    for name, parameter in model.named_parameters():
        owners[parameter.untyped_storage()._cdata] = (name, parameter)
    stored = []
    missing = []
    slice_count = 0
    has_missing_matrices = False  # not only stacks of experts are missing
    for matrix in matrices:
        with torch.no_grad():
            views = matrix.views()
        slices = []
        for view in views:
            name, parameter = owners[view.untyped_storage()._cdata]
            tensor = match(name)
            if tensor is None:
                missing.append(name)
                has_missing_matrices |= parameter.dim() != 3
                continue
            offset = int(view.storage_offset())
            slices.append(
                ParameterSlice(
                    tensor, tuple(parameter.shape), tuple(view.shape), tuple(view.stride()), offset
                )
            )
        slice_count += len(slices)
        stored.append(StoredMatrix(matrix.name, tuple(slices), matrix.finish, matrix.heads))
    if not missing:
        return stored
    # If only stacks are missing, the file has the experts one by one: names and shapes will do.
    if has_missing_matrices and slice_count:
        named = missing[0]
        if len(missing) > 1:
            named += f" and {len(missing) - 1} more"
        raise MissingPart(f"the tensor {named} is missing")
    return None


def matcher(names: Sequence[str]) -> Callable[[str], str | None]:
    """Return a function from the model's name of a tensor to the name that the file has for it.

    The file may have more in front of it (`gpt_neox.`, `model.`), or less.
    """
    exact_names = set(names)
    longer_names: dict[str, list[str]] = {}
    for name in names:
        for shorter in _without_prefixes(name)[1:]:
            longer_names.setdefault(shorter, []).append(name)

    def match(name: str) -> str | None:
        for candidate in _without_prefixes(name):
            if candidate in exact_names:
                return candidate
        # Two longer names are two models in one file, such as an encoder and a decoder.
        candidates = longer_names.get(name, [])
        if len(candidates) != 1:
            return None
        return candidates[0]

    return match


def _without_prefixes(name: str) -> list[str]:
    """Return a name with none, one, two and three of its first parts left out."""
    shorter = [name]
    while len(shorter) <= _MAX_PREFIX_PARTS and "." in shorter[-1]:
        shorter.append(shorter[-1].partition(".")[2])
    return shorter


def _named_matrices(tensors: Tensors, mlp: str) -> list[StoredMatrix]:
    """Return the tensors whose names match, with or without ``.weight``; a stack has many."""
    expression = re.compile(mlp)
    matching = []
    for name in tensors.names():
        if expression.fullmatch(name) or expression.fullmatch(name.removesuffix(".weight")):
            matching.append(name)
    matrices = []
    for name in sorted(matching, key=natural_order):
        shape = tensors.view(name).shape
        if len(shape) < 2:
            continue
        matrix_shape = shape[-2:]  # (rows, columns) of (…, rows, columns)
        stride = contiguous_stride(matrix_shape)
        for number in range(torch.Size(shape[:-2]).numel()):
            offset = number * matrix_shape[0] * matrix_shape[1]
            slice_ = ParameterSlice(name, shape, matrix_shape, stride, offset)
            title = name.removesuffix(".weight")
            if len(shape) > 2:
                title += f"[{number}]"
            # (rows, columns) each, as they are
            matrices.append(StoredMatrix(title, (slice_,), lambda views: views, heads=1))
    if not matrices:
        some = ", ".join(sorted(tensors.names(), key=natural_order)[:8])
        raise MissingPart(
            f"no matrix has a name that {mlp!r} matches as a whole; there are {some}, …"
        )
    return matrices


def _skeleton(tensors: Tensors) -> nn.Module:
    """Build the modules that the names and shapes of a file show."""
    try:
        return skeleton(tensors.names(), lambda name: tensors.view(name).shape, tensors.config)
    except BadTensorName as error:
        raise BadCheckpoint(str(error)) from None

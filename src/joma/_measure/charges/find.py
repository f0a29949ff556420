"""Which charges a model has, by structure, with the reason where an expected one does not exist.

qk        queries and keys of a head act through q·k:
              [W_Q, b_Q][W_Q, b_Q]ᵀ − [W_K, b_K][W_K, b_K]ᵀ   (h, h)
          a rotary embedding leaves one number per rotated plane, and the matrix of the coordinates
          that it does not rotate; heads that share a key count together
vo        values and outputs act through their product:
              [W_V, b_V][W_V, b_V]ᵀ − W_OᵀW_O   (h, h), rotary or not
key_bias  softmax does not see q·b_K, so b_K never moves; a rotary embedding makes it seen
mlp       a neuron of ReLU, or the factor next to a gate:
              ‖w_in‖² + b² − p‖w_out‖²,  φ homogeneous of degree p
norm      a channel of a normalisation against all that read it:  γ² + β² − Σ (their columns)²
sum       LayerNorm does not see the mean: Σ over the stream's axis of everything written to it
          never moves
stream    normalisation does not see the scale, up to its ε:  Σ ‖all that is written‖²;
          post-norm per sublayer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from joma._measure.charges.anatomy import Anatomy, ChargedLayer, anatomy, degree_of
from joma._measure.charges.charge import Charge, Form, Side, Status
from joma.models.matrices import LinearMap
from joma.models.norms import Normalisation, Placement

View = Callable[[Tensor], Tensor]
# A status with the reason for it.
Finding = tuple[Status, str]

_UNPLACED = (
    "whether normalisation comes before or after its sublayer is not known of this model; "
    "say norm='pre' or norm='post'"
)
_NO_FINAL_NORM = "the stream is read without a last normalisation"


def find(model: nn.Module, norm: Placement | None = None) -> list[Charge]:
    """Return the charges of a model, and with status "none" those that might be expected.

    Arguments:
        model: A model with attention.
        norm: Where normalisations stand, before or after their sublayers, if the model is of a
            family whose order is not known.

    Raises:
        ValueError: If no attention was found.
    """
    parts = anatomy(model, norm)
    if not parts.layers:
        raise ValueError(
            f"no attention was found in {type(model).__name__}: charges need query, key and value "
            "projections under a usual name and a number of heads in the module or its config"
        )
    charges: list[Charge] = []
    for layer in parts.layers:
        charges += _attention_charges(parts, layer)
        charges += _mlp_charges(parts, layer)
        charges += _norm_charges(parts, layer)
    charges += _head_charges(parts)
    charges += _sum_charges(parts)
    charges += _stream_charges(parts)
    return [_unless_partly_frozen(charge) for charge in charges]


def _unless_partly_frozen(charge: Charge) -> Charge:
    frozen = [side.name for side in charge.sides if not side.parameter.requires_grad]
    if charge.status is Status.NONE or not frozen or len(frozen) == len(charge.sides):
        return charge
    reason = f"{frozen[0]} is frozen, and what it is held against is not"
    return replace(charge, status=Status.NONE, reason=reason)


# -- sides ----------------------------------------------------------------------------------------


def _identity(rows: Tensor) -> Tensor:
    return rows


def _transposed(rows: Tensor) -> Tensor:
    return rows.T


def _weight_side(parts: Anatomy, linear: LinearMap, view: View, sign: float) -> Side:
    """Return a side that sees a map's weight through ``view`` of its (outputs, inputs)."""

    def view_of_parameter(tensor: Tensor) -> Tensor:
        return view(linear.rows(tensor))

    parameter = linear.weight_parameter
    return Side(parts.name_of(parameter, linear.name), parameter, view_of_parameter, sign)


def _bias_sides(parts: Anatomy, linear: LinearMap, view: View, sign: float) -> list[Side]:
    """Return a side that sees a map's bias as a column (outputs, 1); none without a bias."""
    parameter = linear.bias_parameter
    if parameter is None:
        return []

    def view_of_parameter(tensor: Tensor) -> Tensor:
        return view(linear.bias_rows(tensor)[:, None])

    return [Side(parts.name_of(parameter, linear.name), parameter, view_of_parameter, sign)]


def _sides(parts: Anatomy, linear: LinearMap, view: View, sign: float) -> list[Side]:
    """Return the weight and the bias of a map as sides."""
    return [
        _weight_side(parts, linear, view, sign),
        *_bias_sides(parts, linear, view, sign),
    ]


def _norm_sides(
    parts: Anatomy, norm: Normalisation, sign: float = 1.0, is_flat: bool = False
) -> list[Side]:
    """Return γ and β as sides, one row per channel, or all channels in one row if flat."""

    def view(tensor: Tensor) -> Tensor:
        if is_flat:
            return tensor[None, :]  # (1, d)
        return tensor[:, None]  # (d, 1)

    sides = [Side(parts.name_of(norm.weight, norm.name), norm.weight, view, sign, norm.offset)]
    if norm.bias is not None:
        sides.append(Side(parts.name_of(norm.bias, norm.name), norm.bias, view, sign))
    return sides


def _flattened(side: Side, sign: float) -> Side:
    """Return a side with all entries in one row."""

    def view(tensor: Tensor) -> Tensor:
        return side.view(tensor).reshape(1, -1)

    return Side(side.name, side.parameter, view, sign, side.offset)


# -- inside a block -------------------------------------------------------------------------------


def _by_key_head(heads: int, key_heads: int) -> View:
    """Return a view (H·h, n) → (G, h, H/G · n): one matrix per group of heads that share a key."""

    def view(rows: Tensor) -> Tensor:
        groups = rows.unflatten(0, (key_heads, heads // key_heads, -1))  # (G, H/G, h, n)
        return groups.transpose(1, 2).flatten(2)

    return view


def _attention_charges(parts: Anatomy, layer: ChargedLayer) -> Iterator[Charge]:
    yield from _query_key_charges(parts, layer)
    if layer.attention.key.bias_parameter is not None:
        yield _key_bias_charge(parts, layer)
    if layer.attention.output is not None:
        yield _value_output_charge(parts, layer, layer.attention.output)


def _query_key_charges(parts: Anatomy, layer: ChargedLayer) -> Iterator[Charge]:
    attention = layer.attention
    of_queries = _by_key_head(attention.heads, attention.key_heads)
    of_keys = _by_key_head(attention.key_heads, attention.key_heads)

    def charge(name: str, finding: Finding, form: Form, coordinates: View) -> Charge:
        def of_query(rows: Tensor) -> Tensor:
            return coordinates(of_queries(rows))

        def of_key(rows: Tensor) -> Tensor:
            return coordinates(of_keys(rows))

        sides = (
            *_sides(parts, attention.query, of_query, 1.0),
            *_sides(parts, attention.key, of_key, -1.0),
        )
        return Charge("qk", f"{attention.name}.{name}", *finding, form, sides, layer.index)

    shared = _shared_keys(layer)
    rotary = attention.rotary
    if attention.has_norms:
        yield charge("qk", (Status.NONE, "queries and keys are normalised"), "matrix", _identity)
        return
    if attention.has_learned_key:
        finding = (Status.NONE, "a learned key next to the others is seen as well")
        yield charge("qk", finding, "matrix", _identity)
        return
    if rotary.size == 0:
        finding = (Status.EXACT, f"q·k is all that is seen of them{shared}")
        yield charge("qk", finding, "matrix", _identity)
        return
    if rotary.is_by_halves:
        planes = "one number per rotated plane"
    else:
        planes = "how coordinates are paired is not known: their sum"
    finding = (Status.EXACT, f"rotary: {planes}{shared}")
    yield charge("qk", finding, "rows", _planes(rotary.size, rotary.is_by_halves))
    head_size = attention.query.outputs // attention.heads
    if head_size > rotary.size:
        rest = head_size - rotary.size
        finding = (Status.EXACT, f"the {rest} coordinates that are not rotated{shared}")
        yield charge("qk.rest", finding, "matrix", _after(rotary.size))


def _shared_keys(layer: ChargedLayer) -> str:
    attention = layer.attention
    if attention.heads == attention.key_heads:
        return ""
    members = attention.heads // attention.key_heads
    return f", summed over the {members} queries that share a key"


def _planes(size: int, is_by_halves: bool) -> View:
    """Return a view of rotated coordinates (…, h, n), one row per plane: (…, R/2, 2n).

    If it is not known which coordinates make a plane, all are in one row: (…, 1, R·n).
    """

    def view(rows: Tensor) -> Tensor:
        rotated = rows[..., :size, :]
        if not is_by_halves:
            return rotated.flatten(-2)[..., None, :]
        halves = rotated.unflatten(-2, (2, size // 2))  # (…, 2, R/2, n)
        return halves.transpose(-3, -2).flatten(-2)

    return view


def _after(size: int) -> View:
    """Return a view of the coordinates (…, h − R, n) that are not rotated."""

    def view(rows: Tensor) -> Tensor:
        return rows[..., size:, :]

    return view


def _key_bias_charge(parts: Anatomy, layer: ChargedLayer) -> Charge:
    attention = layer.attention
    if attention.has_norms:
        finding = (Status.NONE, "keys are normalised")
    elif attention.rotary.size:
        finding = (Status.NONE, "rotary: the bias is rotated by position, so it is seen")
    elif parts.is_capped:
        finding = (Status.NONE, "attention logits are soft-capped")
    elif attention.has_learned_key or attention.has_zero_key:
        finding = (Status.NONE, "one more key has no bias, so it is seen")
    else:
        finding = (Status.EXACT, "softmax does not see what all keys have in common")

    def as_vector(column: Tensor) -> Tensor:
        return column[:, 0]

    bias = _bias_sides(parts, attention.key, as_vector, 1.0)
    weight = _weight_side(parts, attention.key, _identity, 1.0)
    return Charge(
        "key_bias",
        f"{attention.name}.key_bias",
        *finding,
        "linear",
        tuple(bias),
        layer.index,
        scale_by=(weight,),
    )


def _value_output_charge(parts: Anatomy, layer: ChargedLayer, output: LinearMap) -> Charge:
    attention = layer.attention
    of_values = _by_key_head(attention.key_heads, attention.key_heads)
    of_outputs = _by_key_head(attention.heads, attention.key_heads)

    def of_output(rows: Tensor) -> Tensor:
        return of_outputs(rows.T)  # the columns of W_O are the heads' coordinates

    sides = (
        *_sides(parts, attention.value, of_values, 1.0),
        _weight_side(parts, output, of_output, -1.0),
    )
    finding = (Status.EXACT, f"only the product is seen{_shared_keys(layer)}")
    if attention.has_gate:
        finding = (Status.NONE, "a gate stands between values and outputs")
    elif attention.has_learned_key:
        finding = (Status.NONE, "a learned value next to the others is seen as well")
    return Charge("vo", f"{attention.name}.vo", *finding, "matrix", sides, layer.index)


def _mlp_charges(parts: Anatomy, layer: ChargedLayer) -> Iterator[Charge]:
    mlp = layer.mlp
    if mlp is None:
        return
    name = f"{mlp.name}.neurons"
    scaled = mlp.factor if mlp.is_gated else mlp.lower
    if scaled is None:
        reason = "the names do not show which of the two maps is the gate"
        yield Charge("mlp", name, Status.NONE, reason, layer=layer.index)
        return
    degree = degree_of(mlp)
    if mlp.is_gated:
        finding = (Status.EXACT, "the factor next to the gate against the map out of the neurons")
    elif degree is None:
        finding = (Status.NONE, "the activation is not homogeneous: φ(2a) ≠ 2φ(a)")
    else:
        finding = (Status.EXACT, f"the activation is homogeneous of degree {degree}")
    sides = (
        *_sides(parts, scaled, _identity, 1.0),
        _weight_side(parts, mlp.upper, _transposed, -float(degree or 1)),
    )
    yield Charge("mlp", name, *finding, "rows", sides, layer.index)


def _norm_charges(parts: Anatomy, layer: ChargedLayer) -> Iterator[Charge]:
    is_last = layer is parts.layers[-1]
    for place, norm in enumerate(layer.norms):
        # The head has a charge with this one.
        if is_last and norm is parts.final_norm:
            continue
        sides = _norm_sides(parts, norm)
        readers = _readers(layer, place)
        if layer.placement is None:
            finding = (Status.NONE, _UNPLACED)
        elif layer.placement == "post":
            finding = (Status.NONE, "post-norm: the residual connection reads it too")
        elif readers is None and layer.has_experts:
            finding = (Status.NONE, "experts and their router read it as well")
        elif readers is None:
            finding = (Status.NONE, _unclear_readers(layer))
        else:
            names = ", ".join(reader.name for reader in readers)
            finding = (Status.EXACT, f"against all that read it: {names}")
            for reader in readers:
                sides.append(_weight_side(parts, reader, _transposed, -1.0))
        yield Charge("norm", f"{norm.name}.channels", *finding, "rows", tuple(sides), layer.index)


def _readers(layer: ChargedLayer, place: int) -> list[LinearMap] | None:
    """Return the maps that read a pre-norm block's first or second norm; None if not all are known."""
    attention = layer.attention
    of_attention: list[LinearMap] | None = [attention.query, attention.key, attention.value]
    # The map that makes the gate reads the norm as well, and so do a router and the experts.
    if attention.has_gate:
        of_attention = None
    of_mlp: list[LinearMap] | None = []
    if layer.has_experts:
        of_mlp = None
    elif layer.mlp is not None:
        of_mlp = list(layer.mlp.readers)
    has_mlp = layer.mlp is not None or layer.has_experts
    if len(layer.norms) == 2 and has_mlp and place == 0:
        return of_attention
    if len(layer.norms) == 2 and has_mlp:
        return of_mlp
    # One for both, in parallel.
    if len(layer.norms) == 1 and of_attention is not None and of_mlp is not None:
        return of_attention + of_mlp
    return None


def _unclear_readers(layer: ChargedLayer) -> str:
    return f"{len(layer.norms)} normalisations in the block: what reads which is not known"


# -- the stream -----------------------------------------------------------------------------------


def _head_charges(parts: Anatomy) -> Iterator[Charge]:
    """Yield the last normalisation against the head, and the sum of the head's rows."""
    norm = parts.final_norm
    head = parts.head
    is_tied = head is not None and parts.is_tied(head.weight_parameter)
    if norm is not None:
        sides = _norm_sides(parts, norm)
        if head is None:
            finding = (Status.NONE, "what reads it is not in the model, or not one map")
        elif is_tied:
            finding = (Status.NONE, f"{head.name} is tied to the embedding")
        else:
            finding = (Status.EXACT, f"against {head.name}, which alone reads it")
        if head is not None:
            sides.append(_weight_side(parts, head, _transposed, -1.0))
        yield Charge("norm", f"{norm.name}.channels", *finding, "rows", tuple(sides))
    # A square map is not a head over a vocabulary.
    if head is None or head.outputs == head.inputs:
        return
    if is_tied:
        finding = (Status.NONE, f"{head.name} is tied to the embedding")
    elif parts.is_capped:
        finding = (Status.NONE, "logits are soft-capped")
    else:
        finding = (Status.EXACT, "a softmax loss does not see what all logits have in common")

    def column_sums(rows: Tensor) -> Tensor:
        return rows.sum(dim=0)  # (d,)

    side = _weight_side(parts, head, column_sums, 1.0)
    yield Charge("sum", f"{head.name}.logits", *finding, "linear", (side,))


@dataclass(frozen=True, eq=False)
class _StreamWriter:
    """What writes to the stream: its parameters as sides, whose views are (d, n)."""

    layer: int | None  # None for embeddings
    sides: tuple[Side, ...]


def _writers(parts: Anatomy) -> list[_StreamWriter]:
    writers = []
    for embedding in parts.embeddings:
        view = partial(_width_first, axis=embedding.axis)
        writers.append(_StreamWriter(None, (Side(embedding.name, embedding.parameter, view),)))
    for layer in parts.layers:
        maps = [layer.attention.output]
        if layer.mlp is not None:
            maps.append(layer.mlp.upper)
        for linear in maps:
            if linear is not None:
                writers.append(
                    _StreamWriter(layer.index, tuple(_sides(parts, linear, _identity, 1.0)))
                )
    return writers


def _width_first(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)  # (d, n)


def _sum_charges(parts: Anatomy) -> Iterator[Charge]:
    for writer in _writers(parts):
        for side in writer.sides:
            summed = Side(side.name, side.parameter, partial(_sum_over_width, side.view), 1.0)
            finding = _finding_of_sum(parts, side.parameter)
            name = f"{side.name}.sum"
            yield Charge("sum", name, *finding, "linear", (summed,), writer.layer)


def _sum_over_width(view: View, tensor: Tensor) -> Tensor:
    return view(tensor).sum(dim=0)


def _finding_of_sum(parts: Anatomy, parameter: Tensor) -> Finding:
    norms = _norms_of_layers(parts)
    for norm in (parts.final_norm, parts.embedding_norm):
        if norm is not None and norm not in norms:
            norms.append(norm)
    if any(layer.placement is None or not layer.norms for layer in parts.layers):
        return Status.NONE, _UNPLACED
    if not all(norm.centres for norm in norms):
        return Status.NONE, "RMSNorm sees the mean"
    if parts.final_norm is None:
        return Status.NONE, _NO_FINAL_NORM
    if parts.has_other_blocks:
        return Status.NONE, "not all that reads the stream was found"
    if parts.is_tied(parameter):
        return Status.NONE, "tied: it also reads the stream"
    if parts.has_dropout:
        return Status.NONE, "dropout after a writer makes the mean seen"
    return Status.EXACT, "LayerNorm does not see the mean"


def _norms_of_layers(parts: Anatomy) -> list[Normalisation]:
    norms: list[Normalisation] = []
    for layer in parts.layers:
        norms += layer.norms
    return norms


def _stream_charges(parts: Anatomy) -> Iterator[Charge]:
    placements = {layer.placement for layer in parts.layers}
    if placements == {"post"}:
        yield from _sublayer_charges(parts)
        return
    norms = _norms_of_layers(parts)
    if parts.final_norm is not None:
        norms.append(parts.final_norm)
    epsilon = max((norm.eps for norm in norms), default=0.0)
    yield Charge(
        "stream",
        "stream",
        *_finding_of_stream(parts, epsilon),
        "rows",
        tuple(_stream_sides(parts)),
        norms=tuple(norms),
    )


def _has_tied_head(parts: Anatomy) -> bool:
    """True if the head is the embedding that enters the first block."""
    if parts.embedding_norm is not None or parts.head is None:
        return False
    return parts.is_tied(parts.head.weight_parameter)


def _stream_sides(parts: Anatomy) -> list[Side]:
    sides: list[Side] = []
    writers = _writers(parts)
    # A normalised embedding enters the first block with the scale of its normalisation.
    if parts.embedding_norm is not None:
        writers = writers[len(parts.embeddings) :]
        sides += _norm_sides(parts, parts.embedding_norm, is_flat=True)
    for writer in writers:
        for side in writer.sides:
            sides.append(_flattened(side, 1.0))
    if _has_tied_head(parts) and parts.final_norm is not None:
        sides += _norm_sides(parts, parts.final_norm, -1.0, is_flat=True)
    return sides


def _finding_of_stream(parts: Anatomy, epsilon: float) -> Finding:
    is_normalised = parts.embedding_norm is not None
    if {layer.placement for layer in parts.layers} != {"pre"}:
        return Status.NONE, _UNPLACED
    if parts.final_norm is None:
        return Status.NONE, _NO_FINAL_NORM
    if not parts.embeddings and not is_normalised:
        return Status.NONE, "what enters the first block is not among the model's parameters"
    if parts.has_padding and not is_normalised:
        return Status.NONE, "padding_idx: the padding row is read but not trained"
    if parts.has_other_blocks or not all(_has_all_writers(layer) for layer in parts.layers):
        return Status.NONE, "not all that writes to the stream was found"
    reason = f"normalisation does not see the scale, but for ε = {epsilon:g}"
    if _has_tied_head(parts):
        reason += ", less the last normalisation, since the head is tied"
    return Status.EPSILON if epsilon else Status.EXACT, reason


def _has_all_writers(layer: ChargedLayer) -> bool:
    return layer.mlp is not None and layer.attention.output is not None and not layer.has_experts


# -- post-norm ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sublayer:
    """An attention module or an MLP between two normalisations."""

    name: str
    writer: LinearMap | None
    readers: Sequence[LinearMap]


def _sublayers(layer: ChargedLayer) -> list[_Sublayer]:
    attention = layer.attention
    projections = (attention.query, attention.key, attention.value)
    sublayers = [_Sublayer(attention.name, attention.output, projections)]
    if layer.mlp is not None:
        sublayers.append(_Sublayer(layer.mlp.name, layer.mlp.upper, layer.mlp.readers))
    return sublayers


def _sublayer_charges(parts: Anatomy) -> Iterator[Charge]:
    """Yield what enters each sublayer and what it adds, against what reads it."""
    entering = parts.embedding_norm
    for layer in parts.layers:
        sublayers = _sublayers(layer)
        if len(layer.norms) != len(sublayers):
            reason = _unclear_readers(layer)
            name = f"{layer.name}.stream"
            yield Charge("stream", name, Status.NONE, reason, layer=layer.index)
            entering = None
            continue
        for sublayer, leaving in zip(sublayers, layer.norms, strict=True):
            yield _sublayer_charge(parts, layer.index, sublayer, entering, leaving)
            entering = leaving


def _sublayer_charge(
    parts: Anatomy,
    layer: int,
    sublayer: _Sublayer,
    entering: Normalisation | None,
    leaving: Normalisation,
) -> Charge:
    name = f"{sublayer.name}.stream"
    if entering is None or sublayer.writer is None:
        reason = "what enters the sublayer is not among the model's parameters"
        return Charge("stream", name, Status.NONE, reason, layer=layer)
    sides = _norm_sides(parts, entering, is_flat=True)
    for side in _sides(parts, sublayer.writer, _identity, 1.0):
        sides.append(_flattened(side, 1.0))
    for reader in sublayer.readers:
        sides.append(_flattened(_weight_side(parts, reader, _identity, 1.0), -1.0))
    reason = f"the sublayer's normalisation does not see the scale, but for ε = {leaving.eps:g}"
    return Charge(
        "stream", name, Status.EPSILON, reason, "rows", tuple(sides), layer, norms=(leaving,)
    )

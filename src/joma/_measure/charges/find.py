"""Which charges a model has, by structure, with the reason where one that might be expected is none.

qk        queries and keys of a head act through q·k:  [W_Q, b_Q][W_Q, b_Q]ᵀ − [W_K, b_K][W_K, b_K]ᵀ   (h, h)
          a rotary embedding leaves one number per rotated plane, and the matrix of the coordinates it leaves alone;
          heads that share a key count together
vo        values and outputs act through their product:  [W_V, b_V][W_V, b_V]ᵀ − W_OᵀW_O   (h, h), rotary or not
key_bias  softmax does not see q·b_K, so b_K never moves; a rotary embedding makes it seen
mlp       a neuron of ReLU, or the factor beside a gate:  ‖w_in‖² + b² − p‖w_out‖²,  φ homogeneous of degree p
norm      a channel of a normalisation against all that read it:  γ² + β² − Σ (their columns)²
sum       LayerNorm does not see the mean: Σ over the stream's axis of whatever is written to it never moves
stream    normalisation does not see the scale, up to its ε:  Σ ‖all that is written‖²; post-norm per sublayer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor, nn

from joma._measure.charges.anatomy import (
    Anatomy,
    Block,
    Norm,
    Placement,
    Projection,
    anatomy,
    bias_side,
    side_of,
)
from joma._measure.charges.charge import Charge, Form, Side, Status

View = Callable[[Tensor], Tensor]

_UNPLACED = "whether normalisation comes before or after its sublayer is not known of this model; say norm='pre' or norm='post'"


def find(model: nn.Module, norm: Placement | None = None) -> list[Charge]:
    """All charges of a model, those that do not exist included; a ValueError if it has no attention."""
    parts = anatomy(model, norm)
    if not parts.blocks:
        raise ValueError(
            f"no attention was found in {type(model).__name__}: charges need query, key and value projections under a "
            "usual name and a number of heads in the module or its config"
        )
    charges = [charge for block in parts.blocks for charge in _block(parts, block)]
    charges += [*_ends(parts), *_sums(parts), *_streams(parts)]
    return [_unless_frozen(charge) for charge in charges]


def _unless_frozen(charge: Charge) -> Charge:
    frozen = [side.name for side in charge.sides if not side.parameter.requires_grad]
    if (
        charge.status is Status.NONE
        or not frozen
        or (charge.form == "linear" and len(frozen) == len(charge.sides))
    ):
        return charge
    if len(frozen) == len(charge.sides):
        return charge
    reason = f"{frozen[0]} is frozen, and what it is held against is not"
    return replace(charge, status=Status.NONE, reason=reason)


def _block(parts: Anatomy, block: Block) -> Iterator[Charge]:
    yield from _attention(parts, block)
    yield from _mlp(parts, block)
    yield from _norms(parts, block)


# -- inside a block ----------------------------------------------------------------------------------------


def _heads_view(heads: int, groups: int) -> View:
    """(H·h, n) → (groups, h, H/groups · n): one matrix per group of heads that share a key."""

    def view(rows: Tensor) -> Tensor:
        x = rows.unflatten(0, (groups, heads // groups, -1))  # (groups, members, h, n)
        return x.transpose(1, 2).flatten(2)

    return view


def _both(parts: Anatomy, projection: Projection, view: View, weight: float) -> list[Side]:
    """A projection's weight and bias as sides."""
    return [
        side_of(projection, parts.names, view, weight),
        *bias_side(projection, parts.names, view, weight),
    ]


def _attention(parts: Anatomy, block: Block) -> Iterator[Charge]:
    a, layer = block.attention, block.index
    H, G, R = a.heads, a.key_heads, a.rotary
    size = a.q.shape[0] // H
    of_q, of_k = _heads_view(H, G), _heads_view(G, G)
    shared = "" if H == G else f", summed over the {H // G} queries that share a key"

    def pairs(rows: View) -> list[Side]:
        return [
            *_both(parts, a.q, lambda t: rows(of_q(t)), 1.0),
            *_both(parts, a.k, lambda t: rows(of_k(t)), -1.0),
        ]

    def charge(
        name: str, status: Status, reason: str, form: Form, sides: list[Side], kind: str = "qk"
    ) -> Charge:
        return Charge(kind, f"{a.name}.{name}", status, reason, form, tuple(sides), layer)

    if a.normed:
        yield charge(
            "qk", Status.NONE, "queries and keys are normalised", "matrix", pairs(lambda x: x)
        )
    elif R == 0:
        yield charge(
            "qk",
            Status.EXACT,
            f"q·k is all that is seen of them{shared}",
            "matrix",
            pairs(lambda x: x),
        )
    else:
        planes = _planes(R, a.halves)
        reason = (
            "one number per rotated plane"
            if a.halves
            else "how coordinates are paired is not known: their sum"
        )
        yield charge("qk", Status.EXACT, f"rotary: {reason}{shared}", "rows", pairs(planes))
        if size > R:
            rest = f"the {size - R} coordinates that are not rotated{shared}"
            yield charge("qk.rest", Status.EXACT, rest, "matrix", pairs(lambda x: x[..., R:, :]))
    if a.k.bias is not None:
        bias = bias_side(a.k, parts.names, lambda t: t[:, 0], 1.0)
        weight = (side_of(a.k, parts.names, lambda t: t, 1.0),)
        if R and not a.normed:
            status, reason = Status.NONE, "rotary: the bias is rotated by position, so it is seen"
        elif a.normed:
            status, reason = Status.NONE, "keys are normalised"
        elif parts.capped:
            status, reason = Status.NONE, "attention logits are soft-capped"
        else:
            status, reason = Status.EXACT, "softmax does not see what all keys have in common"
        yield Charge(
            "key_bias", f"{a.name}.key_bias", status, reason, "linear", tuple(bias), layer, weight
        )
    if a.o is None:
        return
    output = side_of(a.o, parts.names, lambda t: _heads_view(H, G)(t.T), -1.0)
    values = _both(parts, a.v, _heads_view(G, G), 1.0)
    yield charge(
        "vo", Status.EXACT, f"only the product is seen{shared}", "matrix", [*values, output], "vo"
    )


def _planes(R: int, halves: bool) -> View:
    """Rows (…, h, n) of the rotated coordinates, a plane each: (…, R/2, 2n); all in one if the pairs are not known."""

    def view(x: Tensor) -> Tensor:
        turned = x[..., :R, :]
        if not halves:
            return turned.flatten(-2)[..., None, :]
        return turned.unflatten(-2, (2, R // 2)).transpose(-3, -2).flatten(-2)

    return view


def _mlp(parts: Anatomy, block: Block) -> Iterator[Charge]:
    mlp = block.mlp
    if mlp is None:
        return
    name = f"{mlp.name}.neurons"
    if mlp.scaled is None:
        yield Charge(
            "mlp",
            name,
            Status.NONE,
            "which of the two maps the gate is, the names do not tell",
            layer=block.index,
        )
        return
    sides = [
        *_both(parts, mlp.scaled, lambda t: t, 1.0),
        side_of(mlp.upper, parts.names, lambda t: t.T, -float(mlp.degree or 1)),
    ]
    if mlp.gated:
        status, reason = Status.EXACT, "the factor beside the gate against the map back"
    elif mlp.degree is None:
        status, reason = Status.NONE, "the activation is not homogeneous: φ(2a) ≠ 2φ(a)"
    else:
        status, reason = Status.EXACT, f"the activation is homogeneous of degree {mlp.degree}"
    yield Charge("mlp", name, status, reason, "rows", tuple(sides), block.index)


def _norm_sides(parts: Anatomy, norm: Norm, weight: float = 1.0, flat: bool = False) -> list[Side]:
    """γ and β, a row per channel; flat: all in one row."""

    def view(t: Tensor) -> Tensor:
        return t[None, :] if flat else t[:, None]

    sides = [
        Side(parts.names.get(id(norm.weight), norm.name), norm.weight, view, weight, norm.offset)
    ]
    if norm.bias is not None:
        sides.append(Side(parts.names.get(id(norm.bias), norm.name), norm.bias, view, weight))
    return sides


def _readers(block: Block, which: int) -> list[Projection] | None:
    """What reads the block's first or second normalisation in pre-norm order."""
    a, mlp = block.attention, block.mlp
    of_attention, of_mlp = [a.q, a.k, a.v], [] if mlp is None else list(mlp.lower)
    if len(block.norms) == 2 and mlp is not None:
        return of_mlp if which else of_attention
    if len(block.norms) == 1:  # one for both, side by side
        return of_attention + of_mlp
    return None


def _norms(parts: Anatomy, block: Block) -> Iterator[Charge]:
    last = block is parts.blocks[-1]
    for which, norm in enumerate(block.norms):
        if norm is parts.final_norm and last:
            continue
        readers = _readers(block, which)
        sides = _norm_sides(parts, norm)
        if block.placement is None:
            status, reason = Status.NONE, _UNPLACED
        elif block.placement == "post":
            status, reason = Status.NONE, "post-norm: the residual connection reads it too"
        elif readers is None:
            status, reason = (
                Status.NONE,
                f"{len(block.norms)} normalisations in the block: what reads which is not known",
            )
        else:
            status, reason = (
                Status.EXACT,
                "against all that read it: " + ", ".join(r.name for r in readers),
            )
            sides += [side_of(reader, parts.names, lambda t: t.T, -1.0) for reader in readers]
        yield Charge(
            "norm", f"{norm.name}.channels", status, reason, "rows", tuple(sides), block.index
        )


# -- the stream --------------------------------------------------------------------------------------------


def _ends(parts: Anatomy) -> Iterator[Charge]:
    """The last normalisation against the head, and the sum of the head's rows."""
    norm, head = parts.final_norm, parts.head
    tied = head is not None and id(head.weight) in parts.tied
    if norm is not None:
        sides = _norm_sides(parts, norm)
        if head is None:
            status, reason = Status.NONE, "what reads it is not in the model, or not one map"
        else:
            sides.append(side_of(head, parts.names, lambda t: t.T, -1.0))
            status = Status.NONE if tied else Status.EXACT
            reason = (
                f"{head.name} is tied to the embedding"
                if tied
                else f"against {head.name}, which alone reads it"
            )
        yield Charge("norm", f"{norm.name}.channels", status, reason, "rows", tuple(sides))
    if head is not None and head.shape[0] != head.shape[1]:
        side = side_of(head, parts.names, lambda t: t.sum(dim=0), 1.0)
        if tied:
            status, reason = Status.NONE, f"{head.name} is tied to the embedding"
        elif parts.capped:
            status, reason = Status.NONE, "logits are soft-capped"
        else:
            status, reason = (
                Status.EXACT,
                "a softmax loss does not see what all logits have in common",
            )
        yield Charge("sum", f"{head.name}.logits", status, reason, "linear", (side,))


def _stream_first(axis: int) -> View:
    """(d, n) from a tensor whose ``axis`` is the stream's."""
    return lambda t: t.movedim(axis, 0).reshape(t.shape[axis], -1)


def _summed(view: View) -> View:
    return lambda t: view(t).sum(dim=0)


def _writers(parts: Anatomy) -> list[tuple[str, int | None, list[tuple[Tensor, Side]]]]:
    """What writes to the stream: name, layer, and its parameters as sides whose views have the stream's axis first."""
    out: list[tuple[str, int | None, list[tuple[Tensor, Side]]]] = []
    for name, tensor, axis in parts.embeddings:
        side = Side(name, tensor, _stream_first(axis))
        out.append((name, None, [(tensor, side)]))
    for block in parts.blocks:
        written = [block.attention.o, None if block.mlp is None else block.mlp.upper]
        for projection in written:
            if projection is not None:
                sides = _both(parts, projection, lambda t: t, 1.0)
                out.append(
                    (projection.name, block.index, [(side.parameter, side) for side in sides])
                )
    return out


def _sums(parts: Anatomy) -> Iterator[Charge]:
    norms = [n for block in parts.blocks for n in block.norms]
    norms += [
        n for n in (parts.final_norm, parts.embedding_norm) if n is not None and n not in norms
    ]
    unknown = any(block.placement is None or not block.norms for block in parts.blocks)
    for _, layer, written in _writers(parts):
        for tensor, side in written:
            summed = Side(side.name, side.parameter, _summed(side.view), 1.0)
            if unknown:
                status, reason = Status.NONE, _UNPLACED
            elif not all(n.centres for n in norms):
                status, reason = Status.NONE, "RMSNorm sees the mean"
            elif parts.final_norm is None:
                status, reason = Status.NONE, "the stream is read without a last normalisation"
            elif id(tensor) in parts.tied:
                status, reason = Status.NONE, "tied: it also reads the stream"
            elif parts.dropout:
                status, reason = Status.NONE, "dropout after a writer makes the mean seen"
            else:
                status, reason = Status.EXACT, "LayerNorm does not see the mean"
            yield Charge("sum", f"{side.name}.sum", status, reason, "linear", (summed,), layer)


def _flat(side: Side, weight: float) -> Side:
    return Side(
        side.name, side.parameter, lambda t: side.view(t).reshape(1, -1), weight, side.offset
    )


def _streams(parts: Anatomy) -> Iterator[Charge]:
    placements = {block.placement for block in parts.blocks}
    if placements == {"post"}:
        yield from _sublayers(parts)
        return
    first = parts.embedding_norm  # then it is what enters the first block, and not the embedding
    written = _writers(parts)[0 if first is None else len(parts.embeddings) :]
    writers = [] if first is None else _norm_sides(parts, first, flat=True)
    writers += [_flat(side, 1.0) for _, _, sides in written for _, side in sides]
    head_tied = first is None and parts.head is not None and id(parts.head.weight) in parts.tied
    if head_tied and parts.final_norm is not None:
        writers += _norm_sides(parts, parts.final_norm, -1.0, flat=True)
    norms = [n for block in parts.blocks for n in block.norms]
    norms += [] if parts.final_norm is None else [parts.final_norm]
    eps = max((n.eps for n in norms), default=0.0)
    if placements != {"pre"}:
        status, reason = Status.NONE, _UNPLACED
    elif parts.final_norm is None:
        status, reason = Status.NONE, "the stream is read without a last normalisation"
    elif not parts.embeddings and first is None:
        status, reason = (
            Status.NONE,
            "what enters the first block is not among the model's parameters",
        )
    elif parts.padding and first is None:
        status, reason = Status.NONE, "padding_idx: the padding row is read but not trained"
    elif any(block.mlp is None or block.attention.o is None for block in parts.blocks):
        status, reason = Status.NONE, "not all that writes to the stream was found"
    else:
        status = Status.EPSILON if eps else Status.EXACT
        tied = ", less the last normalisation, since the head is tied" if head_tied else ""
        reason = f"normalisation does not see the scale, but for ε = {eps:g}{tied}"
    yield Charge("stream", "stream", status, reason, "rows", tuple(writers), norms=tuple(norms))


def _sublayers(parts: Anatomy) -> Iterator[Charge]:
    """Post-norm: what enters a sublayer and what it adds, against what reads it."""
    entering = parts.embedding_norm
    for block in parts.blocks:
        a, mlp = block.attention, block.mlp
        sublayers = [(a.name, a.o, [a.q, a.k, a.v])]
        if mlp is not None:
            sublayers.append((mlp.name, mlp.upper, list(mlp.lower)))
        if len(block.norms) != len(sublayers):
            reason = (
                f"{len(block.norms)} normalisations in the block: what reads which is not known"
            )
            yield Charge("stream", f"{block.name}.stream", Status.NONE, reason, layer=block.index)
            entering = None
            continue
        for (name, written, readers), leaving in zip(sublayers, block.norms, strict=True):
            if entering is None or written is None:
                reason = "what enters the sublayer is not among the model's parameters"
                yield Charge("stream", f"{name}.stream", Status.NONE, reason, layer=block.index)
            else:
                sides = _norm_sides(parts, entering, flat=True)
                sides += [_flat(side, 1.0) for side in _both(parts, written, lambda t: t, 1.0)]
                sides += [
                    _flat(side_of(reader, parts.names, lambda t: t, 1.0), -1.0)
                    for reader in readers
                ]
                reason = f"the sublayer's normalisation does not see the scale, but for ε = {leaving.eps:g}"
                yield Charge(
                    "stream", f"{name}.stream", Status.EPSILON, reason, "rows", tuple(sides), block.index,
                    norms=(leaving,),
                )  # fmt: skip
            entering = leaving

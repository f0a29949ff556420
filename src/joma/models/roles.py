"""Roles of linear maps: which of them may belong to an MLP, by the names and classes around them.

A map is read from the block that it lies in (an element of a list) down to its own name. Attention, poolers, routers,
position biases, state-space mixers, adapters and heads of a model are not MLPs, whatever their shapes. A role that
nothing shows is not guessed: square maps, and maps into fewer neurons, need a name or an activation that shows it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from torch import nn

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ATTENTION = re.compile(r"att(n|en)", re.IGNORECASE)
_QUERY = frozenset({"q", "query", "queries", "wq", "qs"})
_KEY_OR_VALUE = frozenset({
    "k", "v", "kv", "key", "keys", "value", "values", "wk", "wv", "wkv", "ks", "vs", "kvs",
})  # fmt: skip
_FUSED = frozenset({"qkv", "wqkv", "qk"})
_PROJECTIONS = _QUERY | _KEY_OR_VALUE | _FUSED | {"o", "mha", "sa", "ca"}
_INTO_AND_OUT_OF = re.compile(r"^(in|out)_proj$", re.IGNORECASE)
# of names that say MLP
_MLP = frozenset({
    "mlp", "mlps", "ffn", "ffns", "ff", "ffs", "ffw", "expert", "experts", "moe", "glu", "geglu", "swiglu",
})  # fmt: skip
_MLP_NAME = re.compile(r"feed_?forward|dense_?relu_?dense|mlp", re.IGNORECASE)
_MLP_CLASS = re.compile(r"mlp|feed_?forward|ffn|experts?$|Dense\w*Dense", re.IGNORECASE)
# of names of what has the shape of an MLP and is none
_OTHER = frozenset({
    "pool", "pooler", "poolers", "pooling", "router", "routers", "routing", "pos", "position", "positions",
    "positional", "relpos", "rel", "bias", "cpb", "adapter", "adapters", "bbox", "squeeze", "excite", "excitation",
    "se", "embed", "embeds", "embedding", "embeddings", "embedder", "emb", "hypernetwork", "hypernetworks",
    "classifier", "cls", "head", "heads", "mamba", "ssm", "lru", "lora",
})  # fmt: skip
_OTHER_CLASS = re.compile(
    r"Pooler|AttentionPool|Router|Position|Adapter|Squeeze(And)?Exc|SELayer|Embedding|Mamba|SSM|LRU|LSTM|GRU|Hyena|"
    r"Retention"
)
# a class that holds a whole layer, with an MLP of its own maybe: ZambaAttentionDecoderLayer
_LAYER_CLASS = re.compile(r"Layer|Block|Decoder|Encoder|Stage|Transformer|Model|Wrapper")
_LAYERS = frozenset({"layer", "layers", "block", "blocks", "stage", "stages"})
# of a map's own name, where nothing around it says MLP
_MEMBER = re.compile(
    r"^(fc|lin|linear|dense|ff|ffn|w|layer|mlp|(\w+_)?conv|pw|pwconv|proj|l)_?(1|2|3|in|out|up|down)$"
    r"|^(up|down|gate|wi|c_fc|inter\w*|ffn\w*|ff\w*|mlp\w*|expand|fc)(_|\d|$)|h_to_4h|4h_to_h|^proj_(up|down|in|out)",
    re.IGNORECASE,
)
_PLAIN = re.compile(
    r"^(linear|dense|proj|conv(olution)?(1d|2d)?)$"
)  # the map inside a module of its own
_BACK = re.compile(
    r"down|4h_to_h|c_proj|fc_?(2|out)$|^w_?2$|^w_?o(ut)?$|out|lin(ear)?_?2$|dense_?2$",
    re.IGNORECASE,
)
_ACTIVATIONS = re.compile(
    r"relu|gelu|silu|swish|mish|tanh|sigmoid|softplus|elu|activation|act$|glu", re.IGNORECASE
)
_STATE_SPACE = ("A_log", "dt_bias", "A_logs")  # parameters that a selective state space has


def words(name: str) -> frozenset[str]:
    """Return the words of a name, in lower case: to_q -> to, q."""
    return frozenset(word.lower() for word in _WORD.findall(name))


def goes_back(name: str) -> bool:
    """True if a map's own name says that it leads out of the hidden neurons."""
    return bool(_BACK.search(name.rpartition(".")[2]))


class Roles:
    """Roles of the linear maps of a model.

    Attributes:
        modules: name -> module.
    """

    def __init__(self, modules: dict[str, nn.Module], linears: Iterable[str]) -> None:
        self.modules = modules
        self._linears = frozenset(linears)
        self._linears_in: Counter[str] = Counter()
        for name in self._linears:
            self._linears_in.update(_ancestors(name))
        self._holders: dict[str, bool] = {}

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: n for n, name in enumerate(self.modules)}

    def scopes(self, name: str) -> list[str]:
        """The elements of lists that a map lies in with another one, innermost first."""
        return [
            path
            for path in _ancestors(name)
            if _last(path).isdigit() and self._linears_in[path] > 1
        ]

    def may_be_mlp(self, name: str) -> bool:
        """True if nothing says that the map, or module with stacks of matrices, is something else."""
        scopes = self.scopes(name)
        outermost = scopes[-1] if scopes else ""
        inner = [path for path in reversed(_ancestors(name)) if _is_below(path, outermost)]
        around = self._list_name(outermost)
        says_mlp = any(self._says_mlp(path) for path in inner) or _is_mlp_name(around)
        if words(around) & _OTHER or any(self._is_other(path) for path in inner):
            return False
        if words(_last(name)) & _OTHER:
            return False
        if self._is_attention_list(around, outermost) and not says_mlp:
            return False
        for n, path in enumerate(inner):
            # an element of a list of attention modules, as "layers.0.1", has no name of its own
            if _names_attention(_last(path)):
                return False
            below = any(self._says_mlp(other) for other in inner[n + 1 :])
            kind = type(self.modules[path]).__name__ if path in self.modules else ""
            if _ATTENTION.search(kind) and not (below and _LAYER_CLASS.search(kind)):
                return False
        parent = inner[-1] if inner else outermost
        if not (self._says_mlp(parent) and inner) and _names_projection(_last(name)):
            return False
        around_it = [outermost, *inner] if outermost else ["", *inner]
        if not any(self._is_holder(path) for path in around_it):
            return True
        # attention may be gated, too
        is_gate = "gate" in words(_last(name)) and not self._says_mlp(parent)
        return self.is_evident(name) and not is_gate

    def is_evident(self, name: str) -> bool:
        """True if a name, or an activation behind the map, shows that it belongs to an MLP."""
        scopes = self.scopes(name)
        outermost = scopes[-1] if scopes else ""
        inner = [path for path in _ancestors(name) if _is_below(path, outermost)]
        if any(self._says_mlp(path) for path in inner) or _is_mlp_name(self._list_name(outermost)):
            return True
        parent = _last(name.rpartition(".")[0])
        is_intermediate = bool(words(parent) & {"intermediate", "inter"})
        is_member = bool(_MEMBER.search(_last(name)))
        if _PLAIN.match(_last(name)):
            is_member |= bool(_MEMBER.search(parent))
        return is_intermediate or is_member or self._is_before_activation(name)

    def can_pair(self, lower: str, upper: str) -> bool:
        """True if two maps can follow one another: in one module, which is not a list of several."""
        home = self._home(lower)
        if home is not None and not upper.startswith(f"{home}."):
            return False
        common = _common(lower, upper)
        module = self.modules.get(common)
        children = [] if module is None else [name for name, _ in module.named_children()]
        # a list of maps is one MLP if it is called so, and if nothing else is in it
        are_children = lower.rpartition(".")[0] == upper.rpartition(".")[0]
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and (
            home is None or not are_children
        ):
            return False
        if any(self._is_in_another_list(name, common) for name in (lower, upper)):
            return False
        is_numbered = bool(children) and all(child.isdigit() for child in children)
        if is_numbered and not self._follow(common, lower, upper, children):
            return False
        return not self._has_convolution_between(lower, upper, common)

    def _is_in_another_list(self, name: str, common: str) -> bool:
        """True if a map lies in an element of a list below a module."""
        return any(
            _last(path).isdigit()
            and not isinstance(self.modules.get(path.rpartition(".")[0]), nn.Sequential)
            for path in _ancestors(name)
            if _is_below(path, common)
        )

    def _follow(self, common: str, lower: str, upper: str, children: list[str]) -> bool:
        """True if no other map lies between two maps of a sequence, or next to them."""
        start = len(common) + 1 if common else 0
        first = children.index(lower[start:].split(".")[0])
        last = children.index(upper[start:].split(".")[0])
        counts = [
            self._count(f"{common}.{child}" if common else child)
            for child in children[first : last + 1]
        ]
        return counts[0] == counts[-1] == 1 and not any(counts[1:-1])

    def _count(self, path: str) -> int:
        """How many linear maps a module is or has."""
        return self._linears_in[path] or int(path in self._linears)

    def _has_convolution_between(self, lower: str, upper: str, common: str) -> bool:
        """True if a convolution over positions lies between two convolutions: they are not an MLP's."""
        if not isinstance(self.modules[lower], nn.modules.conv._ConvNd):
            return False
        first = self._positions[lower]
        last = self._positions[upper]
        return any(
            isinstance(module, nn.modules.conv._ConvNd) and max(module.kernel_size) > 1
            for name, module in self.modules.items()
            if first < self._positions[name] < last and _is_below(name, common)
        )

    def _home(self, name: str) -> str | None:
        """The outermost module inside the block that says MLP, of those around a map."""
        scopes = self.scopes(name)
        innermost = scopes[0] if scopes else ""
        inner = [path for path in reversed(_ancestors(name)) if _is_below(path, innermost)]
        return next((path for path in inner if self._says_mlp(path)), None)

    def _is_other(self, path: str) -> bool:
        module = self.modules.get(path)
        if module is None:
            return bool(words(_last(path)) & _OTHER)
        own = module._parameters
        has_state_space = any(name in own for name in _STATE_SPACE)
        kind = type(module).__name__
        # a layer or block of a family that is called so holds an MLP maybe: MambaDecoderLayer
        is_other_class = bool(_OTHER_CLASS.search(kind)) and not _LAYER_CLASS.search(kind)
        is_mlp_class = bool(_MLP_CLASS.search(kind))
        return (
            has_state_space
            or bool(words(_last(path)) & _OTHER)
            or (is_other_class and not is_mlp_class)
        )

    def _says_mlp(self, path: str) -> bool:
        if _is_mlp_name(_last(path)):
            return True
        module = self.modules.get(path)
        kind = "" if module is None else type(module).__name__
        return bool(_MLP_CLASS.search(kind)) and not _LAYER_CLASS.search(kind)

    def _list_name(self, element: str) -> str:
        """The name of the list that an element lies in; of a list in a list, that of the outer one."""
        parts = element.split(".")
        while parts and parts[-1].isdigit():
            parts.pop()
        return parts[-1] if parts else ""

    def _is_attention_list(self, name: str, element: str) -> bool:
        if _names_attention(name):
            return True
        module = self.modules.get(element) if element else None
        kind = "" if module is None else type(module).__name__
        return bool(_ATTENTION.search(kind)) and not _LAYER_CLASS.search(kind)

    def _is_holder(self, path: str) -> bool:
        """True if a module has the projections of attention as its own."""
        if path not in self._holders:
            self._holders[path] = path in self.modules and holds_projections(self.modules[path])
        return self._holders[path]

    def _is_before_activation(self, name: str) -> bool:
        """True if an activation follows the map in a sequence, or follows the sequence that ends with it."""
        path = name
        while path:
            parent, _, last = path.rpartition(".")
            module = self.modules.get(parent)
            if not isinstance(module, nn.Sequential):
                return False
            following = list(module.named_children())
            for n, (key, _) in enumerate(following):
                if key == last:
                    following = following[n + 1 :]
                    break
            for _, child in following:
                if _ACTIVATIONS.search(type(child).__name__):
                    return True
                if next(child.parameters(), None) is not None:
                    return False
            path = parent
        return False


def _ancestors(name: str) -> list[str]:
    """The names of the modules around one, the innermost first; not the model itself."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in reversed(range(1, len(parts)))]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _is_below(path: str, top: str) -> bool:
    return path.startswith(f"{top}.") if top else True


def _common(a: str, b: str) -> str:
    """The name of the innermost module around two."""
    shared = []
    for one, other in zip(a.split(".")[:-1], b.split(".")[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)


def _is_map(module: nn.Module) -> bool:
    return (
        isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or "weight" in module._parameters
    )


def _is_mlp_name(name: str) -> bool:
    return bool(words(name) & _MLP or _MLP_NAME.search(name)) and not words(name) & _OTHER


def _names_attention(name: str) -> bool:
    return (
        bool(_ATTENTION.search(name) or words(name) & {"mha", "sa", "ca"})
        and not words(name) & _LAYERS
    )


def _names_projection(name: str) -> bool:
    return bool(
        words(name) & _PROJECTIONS or _ATTENTION.search(name) or _INTO_AND_OUT_OF.match(name)
    )


def holds_projections(module: nn.Module) -> bool:
    """True if a module has queries and keys or values, or one map for all of them, as its own."""
    if getattr(module, "in_proj_weight", None) is not None:
        return True
    children = [words(name) for name, _ in module.named_children()]
    has_query = any(child & _QUERY for child in children)
    has_key_or_value = any(child & _KEY_OR_VALUE for child in children)
    has_fused = any(
        child & _FUSED or (child & _QUERY and child & _KEY_OR_VALUE) for child in children
    )
    # GPT-2's c_attn is a map, not a module with attention in it
    has_map = any(
        _ATTENTION.search(name) and _is_map(child) for name, child in module.named_children()
    )
    return (has_query and has_key_or_value) or has_fused or has_map

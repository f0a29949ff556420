"""What the names of modules, classes and tensors show: one vocabulary for live models and files.

A name is evidence, never proof: shapes and the modules around a map are asked as well (see `joma.models.roles`).
"""

from __future__ import annotations

import re

from torch import nn

# Wrappers put these into the names of modules: DistributedDataParallel, torch.compile, activation
# checkpointing, FSDP.
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# Words of a name: "to_q" -> to, q; "SelfAttention" -> Self, Attention; "MLPBlock" -> MLP, Block.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# A class or module of attention: "attn", "self_attention", "GPT2Attention"; not "Flatten".
ATTENTION = re.compile(r"attn|(?<!fl)atten", re.IGNORECASE)

# -- projections of attention ---------------------------------------------------------------------

# Names of the projections as children of an attention module, as whole names. They are read as
# matrices, so that a near miss ("q_norm", "key_padding") must not match.
PROJECTIONS = {
    "q": re.compile(r"(to_?q|w_?q|q|q_?proj|q_?lin|query(_proj)?)$", re.IGNORECASE),
    "k": re.compile(r"(to_?k|w_?k|k|k_?proj|k_?lin|key(_proj)?)$", re.IGNORECASE),
    "v": re.compile(r"(to_?v|w_?v|v|v_?proj|v_?lin|value(_proj)?)$", re.IGNORECASE),
    "o": re.compile(
        r"(to_?out|w_?o|o|o_?proj|out(_proj|_lin)?|dense|c_proj|proj|output\.dense)$",
        re.IGNORECASE,
    ),
    # All of q, k and v in one matrix: NeoX, GPT-2, ModernBERT, DeBERTa.
    "fused": re.compile(r"(query_key_value|c_attn|w?_?qkv(_proj)?|in_proj)$", re.IGNORECASE),
}
# Words that show a projection of attention, wherever they are in a name: "query_global", "kv_b_proj".
# They only keep a map from being taken for an MLP, so that they may be generous.
_QUERY_WORDS = frozenset({"q", "query", "queries", "wq", "qs"})
_KEY_OR_VALUE_WORDS = frozenset({"k", "key", "keys", "wk", "ks"}) | frozenset(
    {"v", "value", "values", "wv", "vs", "kv", "wkv", "kvs"}
)
_FUSED_WORDS = frozenset({"qkv", "wqkv", "qk"})
# Abbreviations of whole attention modules: multi-head, self- and cross-attention.
_ATTENTION_WORDS = frozenset({"mha", "sa", "ca"})
_PROJECTION_WORDS = (
    _QUERY_WORDS | _KEY_OR_VALUE_WORDS | _FUSED_WORDS | _ATTENTION_WORDS | frozenset({"o"})
)
_INTO_OR_OUT_OF_ATTENTION = re.compile(r"^(in|out)_proj$", re.IGNORECASE)

# -- MLPs -----------------------------------------------------------------------------------------

# Names and classes of MLPs: "mlp", "ffn", "feed_forward", "DenseReluDense", "block_sparse_moe".
_MLP_WORDS = frozenset({"mlp", "mlps", "ffn", "ffns", "ff", "ffs", "ffw"}) | frozenset(
    {"expert", "experts", "moe", "glu", "geglu", "swiglu"}
)
_MLP_NAME = re.compile(r"feed_?forward|dense_?relu_?dense|mlp", re.IGNORECASE)
_MLP_CLASS = re.compile(r"mlp|feed_?forward|ffn|experts?$|Dense\w*Dense", re.IGNORECASE)
# Own names of maps in an MLP, for models in which nothing around them says MLP: "fc1", "linear2",
# "w_in", "up_proj", "gate", "dense_h_to_4h", "intermediate".
_MLP_MEMBER = re.compile(
    r"^(fc|lin|linear|dense|ff|ffn|w|layer|mlp|(\w+_)?conv|pw|pwconv|proj|l)"
    r"_?(1|2|3|in|out|up|down)$"
    r"|^(up|down|gate|wi|c_fc|inter\w*|ffn\w*|ff\w*|mlp\w*|expand|fc)(_|\d|$)"
    r"|h_to_4h|4h_to_h|^proj_(up|down|in|out)",
    re.IGNORECASE,
)
# A map that lies alone in a module and leaves the name to it: "intermediate.dense", "fc1.linear".
_PLAIN_MAP = re.compile(r"^(linear|dense|proj|conv(olution)?(1d|2d)?)$")
# Maps into the hidden neurons: "gate_proj", "dense_h_to_4h", "c_fc", "fc1", "w1", "wi_0".
INTO_NEURONS = re.compile(
    r"gate|up_proj|h_to_4h|c_fc|fc_?(1|in)$|^w_?[13]$|^wi(_\d)?$|intermediate"
    r"|lin(ear)?_?1$|proj_in",
    re.IGNORECASE,
)
# Maps out of the hidden neurons: "down_proj", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo", "output".
OUT_OF_NEURONS = re.compile(
    r"down|4h_to_h|c_proj|fc_?(2|out)$|^w_?2$|^w_?o(ut)?$|output|lin(ear)?_?2$|dense_?2$"
    r"|proj_out|out_proj",
    re.IGNORECASE,
)
# The gate of two maps that read the same input. Of Llama's own code "w1", of T5 "wi_0".
GATE = re.compile(r"gate|wi_0$|w1$")
# Classes of activations: "ReLU", "GELUActivation", "SiLU", "QuickGELUActivation", "LeakyReLU".
ACTIVATION_CLASS = re.compile(
    r"relu|gelu|silu|swish|mish|tanh|sigmoid|softplus|elu|activation|act$|glu", re.IGNORECASE
)
# Attributes of modules that hold their activation, as a module or a function.
ACTIVATION_ATTRIBUTES = (
    "act", "act_fn", "activation", "activation_fn", "intermediate_act_fn", "nonlinearity",
    "activation_function",
)  # fmt: skip

# -- neither attention nor MLP --------------------------------------------------------------------

# Words of modules that often have the shapes of an MLP and are none: poolers, routers, position
# biases, adapters, squeeze-and-excitation, embedders, heads of the model, state-space mixers.
_OTHER_WORDS = frozenset({
    "pool", "pooler", "poolers", "pooling", "router", "routers", "routing", "pos", "position",
    "positions", "positional", "relpos", "rel", "bias", "cpb", "adapter", "adapters", "bbox",
    "squeeze", "excite", "excitation", "se", "embed", "embeds", "embedding", "embeddings",
    "embedder", "emb", "hypernetwork", "hypernetworks", "classifier", "cls", "head", "heads",
    "mamba", "ssm", "lru", "lora",
})  # fmt: skip
_OTHER_CLASS = re.compile(
    r"Pooler|AttentionPool|Router|Position|Adapter|Squeeze(And)?Exc|SELayer|Embedding|Mamba|SSM|LRU"
    r"|LSTM|GRU|Hyena|Retention"
)
# A class that holds a complete layer. It may hold an MLP, whatever else its name says:
# "ZambaAttentionDecoderLayer", "MambaDecoderLayer".
_LAYER_CLASS = re.compile(r"Layer|Block|Decoder|Encoder|Stage|Transformer|Model|Wrapper")
_LAYER_WORDS = frozenset({"layer", "layers", "block", "blocks", "stage", "stages"})
# Parameters that only selective state spaces have.
STATE_SPACE_PARAMETERS = ("A_log", "dt_bias", "A_logs")
# Tables of embeddings, and heads that are often tied to them: "embed_tokens", "wte", "lm_head".
EMBEDDING = re.compile(
    r"emb|^wte$|^wpe$|^word|^position|relative_attention_bias|lm_head|^head$", re.IGNORECASE
)
# Classes of normalisations over the width; batches and groups of channels are normalised otherwise.
NORM_CLASS = re.compile("norm", re.IGNORECASE)
OTHER_NORM_CLASS = re.compile("batch|group", re.IGNORECASE)


# -- paths ----------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """Return the name of a module without what wrappers (DDP, compile, FSDP) put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their plain names. A wrapped module replaces its wrapper."""
    return {plain_name(name): module for name, module in model.named_modules()}


def join(parent: str, name: str) -> str:
    """Return the name of a module or parameter inside another one; the model itself is ``""``."""
    if not parent:
        return name
    return f"{parent}.{name}"


def last_part(path: str) -> str:
    """Return the name of a module inside its parent."""
    return path.rpartition(".")[2]


def parent_of(path: str) -> str:
    """Return the name of the module around one."""
    return path.rpartition(".")[0]


def ancestors(path: str) -> list[str]:
    """Return the names of the modules around one, innermost first, without the model itself."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in reversed(range(1, len(parts)))]


def is_below(path: str, top: str) -> bool:
    """True if a module lies inside another one. Every module lies inside the model, ``""``."""
    return not top or path.startswith(f"{top}.")


def is_inside(path: str, block: str) -> bool:
    """True if a module or matrix is a block or lies inside it; ``block[3]`` is an expert of a stack."""
    return path == block or path.startswith((f"{block}.", f"{block}["))


def common_parent(first: str, second: str) -> str:
    """Return the name of the innermost module around two."""
    shared = []
    for one, other in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)


def list_name(element: str) -> str:
    """Return the name of the list that an element lies in; for a list in a list, the outer one's."""
    parts = element.split(".")
    while parts and parts[-1].isdigit():
        parts.pop()
    if not parts:
        return ""
    return parts[-1]


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts ``layers.2`` before ``layers.10``."""
    key = []
    for part in name.split("."):
        if part.isdigit():
            key.append((0, int(part), ""))
        else:
            key.append((1, 0, part))
    return key


# -- what a name shows ----------------------------------------------------------------------------


def words(name: str) -> frozenset[str]:
    """Return the words of a name in lower case: ``to_q`` has to and q."""
    return frozenset(word.lower() for word in _WORD.findall(name))


def looks_like_attention(class_name: str) -> bool:
    """True if a class is called as attention is."""
    return bool(ATTENTION.search(class_name))


def is_attention_name(name: str) -> bool:
    """True for ``self_attn`` and ``mha``, and not for ``attention_layers``, which hold MLPs as well."""
    is_called_attention = bool(ATTENTION.search(name) or words(name) & _ATTENTION_WORDS)
    return is_called_attention and not words(name) & _LAYER_WORDS


def is_projection_name(name: str) -> bool:
    """True if the own name of a map shows that it belongs to attention."""
    return bool(
        words(name) & _PROJECTION_WORDS
        or ATTENTION.search(name)
        or _INTO_OR_OUT_OF_ATTENTION.match(name)
    )


def is_mlp_name(name: str) -> bool:
    """True for names of MLPs, and not for ``mlp_head`` or ``router_mlp``."""
    is_called_mlp = bool(words(name) & _MLP_WORDS or _MLP_NAME.search(name))
    return is_called_mlp and not is_other_name(name)


def is_mlp_class(class_name: str) -> bool:
    """True for classes of MLPs."""
    return bool(_MLP_CLASS.search(class_name))


def is_mlp_member(name: str, parent: str) -> bool:
    """True if the own name of a map, or of the module that it lies alone in, is one of an MLP's maps."""
    if words(parent) & {"intermediate", "inter"} or _MLP_MEMBER.search(name):
        return True
    return bool(_PLAIN_MAP.match(name) and _MLP_MEMBER.search(parent))


def is_other_name(name: str) -> bool:
    """True for names of what has the shape of an MLP and is none."""
    return bool(words(name) & _OTHER_WORDS)


def is_other_class(class_name: str) -> bool:
    """True for classes of what has the shape of an MLP and is none."""
    if is_layer_class(class_name) or is_mlp_class(class_name):
        return False
    return bool(_OTHER_CLASS.search(class_name))


def is_layer_class(class_name: str) -> bool:
    """True for classes that hold a complete layer."""
    return bool(_LAYER_CLASS.search(class_name))


def leads_out_of_neurons(name: str) -> bool:
    """True if a map's own name shows that it leads out of the hidden neurons."""
    return bool(OUT_OF_NEURONS.search(last_part(name)))


def has_projections(module: nn.Module) -> bool:
    """True if the children of a module are queries and keys or values, or one map for all of them."""
    for weight_name in ("in_proj_weight", "q_proj_weight"):
        if getattr(module, weight_name, None) is not None:
            return True
    has_query = False
    has_key_or_value = False
    for name, child in module.named_children():
        of_child = words(name)
        is_query = bool(of_child & _QUERY_WORDS)
        is_key_or_value = bool(of_child & _KEY_OR_VALUE_WORDS)
        if of_child & _FUSED_WORDS or (is_query and is_key_or_value):
            return True
        # GPT-2's c_attn is a map; a module "self_attn" is not, and has projections of its own.
        if ATTENTION.search(name) and _is_map(child):
            return True
        has_query |= is_query
        has_key_or_value |= is_key_or_value
    return has_query and has_key_or_value


def _is_map(module: nn.Module) -> bool:
    is_known = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    return is_known or "weight" in module._parameters


def family_of(module: nn.Module) -> str:
    """Return the family of a module as transformers calls it in ``model_type``; "" for others."""
    for base in type(module).__mro__:
        match = re.match(r"transformers\.models\.(\w+)\.", base.__module__)
        if match is not None:
            return match[1]
    # A module of a file's skeleton has the file's config.
    family = getattr(getattr(module, "config", None), "model_type", None)
    if not isinstance(family, str):
        return ""
    return family

"""Reasons why an attention is not measured, or only in part: codes to filter and search for."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """A code with its meaning and what to do about it.

    Attributes:
        value: the code, which stands in brackets at the end of a message.
        meaning: one sentence, shown in the documentation.
        advice: one sentence.
    """

    meaning: str
    advice: str

    def __new__(cls, code: str, meaning: str, advice: str) -> Reason:
        """Make the code the value, and the sentences attributes."""
        reason = object.__new__(cls)
        reason._value_ = code
        reason.meaning = meaning
        reason.advice = advice
        return reason

    def __str__(self) -> str:
        return f"[{self.value}]"

    # A layer is reported, with less than usual
    HEAD_AXIS = (
        "head-axis",
        "It is not certain which axis holds the heads, so the layer is reported as one, the "
        "mean over its heads.",
        "Pass `heads=`, by module if need be.",
    )
    PART_OF_QUERIES = (
        "part-of-queries",
        "The module attends with some of its queries (ProbSparse), and only those are measured.",
        "Read the layer as the mean over these queries; the message has their share.",
    )

    # An attention was seen, and its numbers would be wrong or would mean something else
    QUERY_AXIS = (
        "query-axis",
        "It is not clear which axis of the scores holds the queries.",
        "Use a batch size and a number of heads that differ from the number of tokens.",
    )
    SWAPPED_AXES = (
        "swapped-axes",
        "The module attends over the heads of each token, not over tokens.",
        "Check whether two axes are swapped: attention takes (batch, heads, tokens, d).",
    )
    CHANNELS = (
        "channels",
        "The module attends over channels (XCiT), not over tokens.",
        "Nothing: there is no distribution over tokens to measure.",
    )
    DIFFERENCE = (
        "difference",
        "Two attention maps over the same values are combined (differential attention).",
        "Nothing: what the module attends to is neither of the two maps.",
    )
    NO_PRODUCT = (
        "no-product",
        "A softmax is changed before it is multiplied with values (talking heads, a second "
        "normalisation), or it is used for something else.",
        "Nothing, if heads are mixed on purpose; otherwise multiply the softmax itself with the "
        "values.",
    )
    PIECES = (
        "pieces",
        "The module attends several times in one call, with a part of its queries or keys each "
        "(blocks, landmarks).",
        "Watch the model with full attention, if it has that option.",
    )
    LOOP = (
        "loop",
        "The module attends several times in one call, in a loop over heads or samples.",
        "Compute all heads and samples in one call.",
    )
    CHUNKS = (
        "chunks",
        "The module attends in chunks or sliding blocks: its scores are rearranged before the "
        "softmax.",
        "Watch the model with full attention, if it has that option.",
    )
    GUARD = (
        "guard",
        "The output of the module is not softmax(scores)·V of the queries, keys and mask that "
        "were seen.",
        "Use `scaled_dot_product_attention`, or the attention implementation `sdpa` or `eager`.",
    )
    UNCHECKED = (
        "unchecked",
        "The output of the module could not be compared with softmax(scores)·V.",
        "Report the message; it names the exception.",
    )
    PADDING_CONFLICT = (
        "padding-conflict",
        "An argument and the mask that is applied disagree about which tokens are padding.",
        "Pass `padding=`.",
    )
    PADDING_UNCLEAR = (
        "padding-unclear",
        "The mask fits padding as well as real tokens, and no argument decides.",
        "Pass `padding=`: a mask (B, T) that is 1 at real tokens.",
    )

    # No softmax over keys was seen in a module that looks like attention
    NO_SOFTMAX = (
        "no-softmax",
        "Scores are multiplied with values without a softmax function (exp and sum by hand, a "
        "sigmoid, a kernel of its own).",
        "Use `torch.softmax` or `scaled_dot_product_attention`, if the module computes a softmax.",
    )
    LINEAR = (
        "linear",
        "Keys are multiplied with values first (linear attention): no softmax over keys is "
        "computed.",
        "Nothing: there is no distribution over tokens to measure.",
    )
    NOT_DOT_PRODUCT = (
        "not-dot-product",
        "The weights are a softmax, but not of a product of queries and keys (outlook or "
        "additive attention).",
        "Nothing: joma measures dot-product attention.",
    )
    TORCHSCRIPT = (
        "torchscript",
        "The module is TorchScript, which runs outside of Python and cannot be seen.",
        "Watch the model before `torch.jit.script` or `torch.jit.trace`.",
    )
    UNSEEN = (
        "unseen",
        "Neither fused attention nor a softmax over a product of queries and keys was seen in the "
        "module: a recurrence, or a kernel that is not PyTorch's.",
        "If the module computes attention, use `scaled_dot_product_attention` or `torch.softmax`.",
    )
    NO_ATTENTION = (
        "no-attention",
        "No attention was seen in the model, and no module of it that ran looks like attention.",
        'Ask for gauges of weights only, such as `gauges="stable_rank"`, or watch the part that '
        "attends.",
    )
    NOT_RUN = (
        "not-run",
        "No pass of the model was seen since the last step.",
        "Run the watched model itself; if the training step around it is compiled, pass `probe=`.",
    )

    # The model runs in a way in which values cannot be read
    TRANSFORMED = (
        "torch-func",
        "The model runs inside `torch.func` (grad, vmap, …), where values cannot be read.",
        "Pass `probe=`.",
    )
    THREADS = (
        "threads",
        "While a pass was measured, the model was called in another thread, and that call is "
        "not measured.",
        "Watch a copy of the model in each thread.",
    )
    COLLECTIVE = (
        "collective",
        "The forward pass waits for other processes, and an extra pass of this process alone "
        "ends before that.",
        'Pass `processes="all"` in every process.',
    )
    CHANGED_INPUT = (
        "changed-input",
        "The forward pass of a compiled model writes to its input, so that the pass cannot be "
        "repeated.",
        "Pass `probe=`, or copy the input before it is written to.",
    )
    NESTED = (
        "nested",
        "The module attends with nested tensors, which are not measured.",
        "Pack documents with a block-diagonal mask, or pad them.",
    )
    PAGED = (
        "paged",
        "The kernel uses a part of its keys only, or keeps them in pages.",
        "Watch training, or a probe without a cache.",
    )
    SHARDED = (
        "sharded",
        "The module gets tensors of which a part is here only (tensor or context parallelism).",
        "Watch a model that is not sharded in this way; FSDP2 and DDP are measured.",
    )
    WRAPPER = (
        "wrapper",
        "The model is wrapped in DataParallel or the first FSDP.",
        "Use DistributedDataParallel or `fully_shard`.",
    )
    PROBE = (
        "probe",
        "The pass of the probe batch failed.",
        "Check the batch; the message has the exception of the model.",
    )
    INTERNAL = (
        "internal",
        "joma failed; training was not touched.",
        "Report the message; it names the exception.",
    )


class Refusal(ValueError):
    """An attention cannot be measured; the message ends with the code of the reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{message} {reason}")
        self.reason = reason


def message_of(error: Exception) -> str:
    """Return the message of a problem, with a code at its end."""
    if isinstance(error, Refusal):
        return str(error)
    return f"{type(error).__name__}: {error} {Reason.INTERNAL}"

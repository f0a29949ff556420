"""The eight texts that Figure 10 prints, in four pairs, and which neurons both texts of a pair fire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma._inspect.superposition import Superposition

# (A, B) of each group, as printed: the first two were read by Pythia-160M, the other two by Pythia-70M
PAIRS = (
    (
        "Every morning, as the city slowly awakens with the distant hum of traffic and the chirping of "
        "sparrows, John takes a moment to savor the peaceful ambiance before he walks his dog, Max, around "
        "the block, greeting familiar faces and enjoying the fresh air.",
        "In the realm of physics, when water is subjected to a temperature of 100°C at one atmosphere of "
        "pressure, it undergoes a phase transition from liquid to gas, producing steam that has long been "
        "harnessed for various technological and culinary applications.",
    ),
    (
        "The Sahara Desert, stretching across North Africa, is the third largest desert in the world and is "
        "renowned for its vast sand dunes and scorching temperatures. Despite its harsh conditions, it's home"
        " to various unique species that have adapted to its extreme environment.",
        "Novels, beyond their entertainment value, serve as mirrors to society, often reflecting cultural, "
        "social, and political nuances of their time. Authors like George Orwell and Jane Austen used their "
        "works to critique and provide insights into the world they lived in.",
    ),
    (
        "Cats are known for their independent nature. Many people appreciate them for their low-maintenance "
        "lifestyle, often content with just a comfortable spot to nap and an occasional playtime.",
        "Rainforests are vital for the Earth's ecosystem. They provide a habitat for countless species, many "
        "of which are not found anywhere else. Additionally, they play a crucial role in regulating global "
        "climate and producing oxygen.",
    ),
    (
        "The Eiffel Tower, an iconic landmark in Paris, was originally constructed as a temporary exhibit for"
        " the 1889 World's Fair. Over the years, it has become a symbol of the city's romance and "
        "architectural prowess, attracting millions of tourists annually.",
        "The human digestive system is a complex network of organs working together to break down food into "
        "essential nutrients. Beginning with the mouth and ending at the small intestine, each part plays a "
        "crucial role in ensuring our bodies receive the energy and vitamins needed for daily function.",
    ),
)


def fired_by_both(
    model: str | Path, revision: str | None, corpus: Superposition
) -> list[list[int]]:
    """(4, 4): how many neurons text A of a row and text B of a column both fire; the paper's pairs are the diagonal.

    A text fires a neuron if it excites it at least `FIRES` as much as the strongest context in the corpus does. The
    pairs off the diagonal are the control: texts that the paper does not pair.
    """
    import torch

    from joma._checkpoints.options import CheckpointOptions
    from joma._data.pretrained import encode
    from joma._inspect.collect import collect
    from joma._inspect.group import FIRES
    from joma._inspect.windows import open_model

    net, tokenizer = open_model(model, CheckpointOptions(), revision)
    strongest = {layer: kept.value.amax(dim=1) for layer, kept in corpus.strongest.items()}

    def fired(text: str) -> dict[int, Any]:
        tokens = encode(tokenizer, text)
        peaks = collect(net, [torch.tensor([tokens])], None, 2, len(tokens))  # one window
        return {
            n: (p.value.amax(dim=1) >= FIRES * strongest[n]) & (strongest[n] > 0)
            for n, p in peaks.items()
        }

    first, second = ([fired(pair[n]) for pair in PAIRS] for n in (0, 1))
    return [[sum(int((a[layer] & b[layer]).sum()) for layer in a) for b in second] for a in first]

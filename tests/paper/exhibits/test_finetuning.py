"""The exhibit finetuning: reactions, random changes, and judges that say no."""

import numpy as np
import pytest
import torch

from joma import Run
from joma._runs import RunWriter
from joma._show import plots
from joma.paper.exhibits import finetuning
from joma.paper.labs.finetuning import PARTS, SMALL, FineTunings, part_changes, randomly_changed
from joma.paper.labs.reactions import END, START, reaction_ids, reactions, split, used_tokens


def test_reactions_are_different_and_their_tokens_make_them_up():
    made = reactions()
    assert len(set(made)) == len(made)
    for reaction in made[::97]:
        assert "".join(split(reaction)) == reaction
        # Atoms of the product come from the reactants.
        before, after = reaction.split(">>")
        for atom in ("N", "O", "c", "n", "F"):
            assert split(after).count(atom) <= split(before).count(atom)
    with pytest.raises(ValueError, match="not SMILES"):
        split("C C")


def test_ids_are_those_of_the_vocabulary():
    vocabulary = used_tokens()
    ids = reaction_ids(vocabulary, 49, 20, 3)
    assert ids.shape == (20, 49)
    assert len({tuple(row) for row in ids.tolist()}) == 20
    for row in ids:
        tokens = [vocabulary[n] for n in row]
        assert (tokens[0], tokens[-1]) == (START, END)
        assert "".join(tokens[1:-1]) in reactions()
    with pytest.raises(ValueError, match="choose another length"):
        reaction_ids(vocabulary, 49, 10_000, 0)
    with pytest.raises(ValueError, match="no token"):
        reaction_ids([START, END, "C"], 49, 2, 0)


@pytest.fixture(scope="module")
def small():
    pytest.importorskip("transformers")
    return FineTunings.load(SMALL, 0)


def test_random_changes_have_the_norm_of_the_fine_tuning_in_every_parameter(small):
    tuned = small.tuned["fine-tuned"]
    changed = randomly_changed(small.base, tuned, np.random.default_rng(0))
    before = dict(small.base.named_parameters())
    after = dict(tuned.named_parameters())
    for name, weight in changed.named_parameters():
        wanted = (after[name] - before[name]).norm()
        assert torch.allclose((weight - before[name]).norm(), wanted, rtol=1e-4, atol=1e-7)
        if wanted > 0:
            assert not torch.allclose(weight, after[name])


def test_ranks_are_those_of_singular_values(small):
    tuned = small.tuned["fine-tuned again"]
    (lower, *_) = part_changes(small.base, tuned, 3, np.random.default_rng(0))
    assert lower.part == "mlp_in"
    for layer in range(2):
        name = f"encoder.layer.{layer}.intermediate.dense.weight"
        old = small.base.state_dict()[name].double().numpy()
        new = tuned.state_dict()[name].double().numpy()
        for gauge, matrix in (("change_rank", new - old), ("rank", new), ("rank_before", old)):
            s = np.linalg.svd(matrix, compute_uv=False)
            assert lower.values[gauge][layer] == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-5)
        change = np.linalg.norm(new - old) / np.linalg.norm(old)
        assert lower.values["change"][layer] == pytest.approx(change, rel=1e-6)
    assert lower.values["random_change_rank"].shape == (2, 3)


LAYERS = 4
DRAWS = 5


def made(folder, change_rank, rank):
    """A run of two fine-tunings; random changes have a stable rank of 50 to 54, and give 20 to 20.4."""
    draws = np.tile(np.arange(DRAWS), (LAYERS, 1))
    with RunWriter.create(
        folder / "run", kind="exhibit", config={}, axes=finetuning.AXES
    ) as writer:
        for model in ("one", "two"):
            for part in PARTS:
                numbers = {
                    "change": np.full(LAYERS, 0.1),
                    "change_rank": np.full(LAYERS, change_rank[part == "v"]),
                    "rank_before": np.full(LAYERS, 19.0),
                    "rank": np.array(rank),
                    "random_change_rank": 50.0 + draws,
                    "random_rank": 20.0 + 0.1 * draws,
                }
                writer.write(0, numbers, model=model, part=part)
            scalars = {
                "embedding_change": 0.1,
                "embedding_cosine_before": 0.2,
                "embedding_cosine": 0.3,
            }
            writer.write(0, scalars, model=model)
            writer.write(0, {"random_cosine": np.full(DRAWS, 0.2)}, model=model)
            entropies = {
                "entropy_before": np.full(LAYERS, 2.0),
                "entropy": np.full(LAYERS, 1.5),
                "random_entropy": np.full((LAYERS, DRAWS), 2.0),
            }
            writer.write(0, entropies, model=model)
    return Run(folder / "run")


@pytest.mark.parametrize(
    ("change_rank", "rank", "verdict"),
    [
        ((3.0, 3.0), (19.0, 19.0, 21.0, 20.2), "holds"),
        ((3.0, 3.0), (19.0, 21.0, 20.1, 20.2), "holds under a condition"),  # half of the layers
        ((3.0, 51.0), (19.0, 19.0, 21.0, 19.0), "fails"),  # one part is as random
    ],
)
def test_the_rule(tmp_path, change_rank, rank, verdict):
    run = made(tmp_path, change_rank, rank)
    judgement = finetuning.judge(run)
    assert judgement.verdict == verdict
    assert judgement.numbers["models"]["two"]["matrices"] == LAYERS * len(PARTS)
    plots.save(finetuning.draw(run), tmp_path)
    assert "NaN" not in (tmp_path / "figure.svg").read_text()

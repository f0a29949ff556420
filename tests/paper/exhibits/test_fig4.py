"""Figure 4: its flows against the joint flow of a block and the closed form of Eqn. 6; a judge that can say holds."""

import numpy as np
import pytest

from joma import Run
from joma._runs import RunWriter
from joma.paper.exhibits import fig4
from joma.paper.labs.rebound import dip_and_rebound, entropy, eqn6_path, joint_path
from joma.theory import JointFlow, solve_bounce
from joma.theory.tasks import orthogonal_regression

MU = np.array([0.5, 1.0, 1.5])


@pytest.mark.parametrize("target", [MU, MU * np.exp(MU**2 / 2)])
def test_the_joint_path_is_that_of_a_block_with_its_attention(target):
    t, v = joint_path(target, end=5.0)
    path = JointFlow(orthogonal_regression(target), "exp", "linear").integrate(
        5.0, times=np.array([0.0, *t[::20]])
    )
    np.testing.assert_allclose(path.v[1:, :, 0], v[::20], atol=1e-6)


def test_the_same_critical_point():
    _, v = joint_path(MU * np.exp(MU**2 / 2))
    np.testing.assert_allclose(v[-1], MU, atol=1e-9)


def test_the_trough_of_eqn6_is_that_of_the_closed_form():
    mu = np.linspace(1, 3, 20)
    trough = solve_bounce(mu, np.linspace(0, 2, 8001)).trough()
    dip, rebound = dip_and_rebound(entropy(eqn6_path(mu)[1]))
    assert dip == pytest.approx(trough.start - trough.entropy, abs=1e-3)
    assert dip - rebound == pytest.approx(np.log(20) - entropy(mu[None])[0], abs=1e-6)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("fig4") / "run"
    with RunWriter.create(path, kind="exhibit", config={}, axes=fig4.AXES) as writer:
        fig4.run(writer, {"components": 10, "seeds": 1, "times": 101}, 0, lambda share, what: None)
    return list(Run(path).rows())


def changed(rows, path, change):
    with RunWriter.create(path, kind="exhibit", config={}, axes=fig4.AXES) as writer:
        for row in rows:
            extra = {k: v for k, v in row.items() if k not in ("step", "gauge", "value")}
            writer.write(row["step"], {row["gauge"]: change(row)}, **extra)
    return Run(path)


def test_the_judge_tells_m_and_follows_the_term_and_the_curves(rows, tmp_path):
    made = fig4.judge(changed(rows, tmp_path / "made", lambda r: r["value"]))
    assert made.verdict == "holds under a condition"
    assert made.measured.startswith("M = 10: ")
    assert (
        made.numbers["rebound by ε"]["joint"]["0.16"]
        > 0.5 * made.numbers["rebound by ε"]["joint"]["1.0"]
    )
    assert all(
        made.numbers["cases"]["joint"][name] >= made.numbers["cases"]["eqn6"][name]
        for name in ("depth", "rebound")
    )
    shift = changed(
        rows, tmp_path / "shift", lambda r: 1.0 if r["gauge"] == "rebound" else r["value"]
    )
    assert fig4.judge(shift).verdict == "holds"
    joint = {"gauge": "entropy", "case": "joint"}
    flat = changed(
        rows, tmp_path / "flat", lambda r: 2.0 if joint.items() <= r.items() else r["value"]
    )
    assert fig4.judge(flat).verdict == "fails"

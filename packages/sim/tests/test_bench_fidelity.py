"""Bench `fidelity`: its figures, from seconds a step."""

from packages.sim.benchmarks import fidelity

MEASURED = {"sync": 2.0, "bounded": 1.0, "decoupled": 1.04}


def test_figures_compare_predictions_with_measurements() -> None:
    own = {"sync": 1.9, "bounded": 1.2, "decoupled": 1.0}
    advised = {"sync": 1.5, "bounded": 1.6, "decoupled": 1.04}
    figures = fidelity.figures_of(MEASURED, own, advised)
    assert figures["measured_s"] == [2.0, 1.0, 1.04]
    assert figures["own_ratio"] == [0.95, 1.2, 0.9615]
    assert (figures["own_agrees"], figures["advice_agrees"]) == (2, 1)
    # bounded and decoupled are a tie; of the other two pairs, one is predicted reversed
    assert figures["advice_order"] == 0.5


def test_measurements_that_do_not_differ_have_no_order() -> None:
    equal = {"sync": 1.0, "bounded": 1.01}
    assert fidelity.figures_of(equal, equal, equal)["advice_order"] is None

"""All experiments by name: each gives its own rows, wrong names are refused, and worker
processes may die.
"""

import pytest

from rollweave.schema.errors import ConfigError
from rollweave_papers.results import Experiment
from rollweave_papers.running import EXPERIMENTS, PAPERS, run, select
from tests.support.variants import mostly_slow

SLOW = frozenset(
    {
        "rollart-fig4",
        *(
            f"rollart-{figure}-{size}"
            for figure in ("fig10b", "fig13")
            for size in ("8b", "14b", "32b")
        ),
        "rollart-fig10b-varied",
        *(f"rollart-{figure}" for figure in ("fig10c", "fig11a", "fig11b", "fig12", "fig14a")),
        *(f"rollart-{one}" for one in ("fig14b", "table4", "table5")),
        *(
            f"rose-{one}"
            for one in (
                *("fig1c", "fig7", "fig8", "fig9", "fig10", "fig14"),
                *(f"table{n}" for n in (1, 2, 3, 4, 5)),
            )
        ),
        *(f"prorl-{one}" for one in ("fig5", "table3")),
    }
)
"""Experiments of RollArt, ROSE and ProRL that take two processor seconds or more in
quick form.
"""


def quick_ones() -> list[object]:
    names = [name for name in EXPERIMENTS if name.partition("-")[0] in ("rollart", "rose", "prorl")]
    return mostly_slow(names, set(names) - SLOW)


def test_names_and_papers_select() -> None:
    assert list(EXPERIMENTS) == [experiment.name for experiment in select([])]
    assert {name.partition("-")[0] for name in EXPERIMENTS} == set(PAPERS)
    chosen = [experiment.name for experiment in select(["rose", "rollart-fig4", "rose-fig14"])]
    assert chosen[0] == "rollart-fig4"
    assert len(chosen) == len(set(chosen))
    assert set(chosen[1:]) == {name for name in EXPERIMENTS if name.startswith("rose-")}


@pytest.mark.parametrize(
    ("name", "near"), [("rolart", "rollart"), ("rollart-fig44", "rollart-fig4"), ("zzz", "one of")]
)
def test_refuses_unknown_names_in_one_line_with_close_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as problem:
        select([name])
    assert near in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.variants
@pytest.mark.parametrize("name", quick_ones())
def test_an_experiment_gives_rows_of_its_own(name: str) -> None:
    rows = EXPERIMENTS[name].rows(True)
    assert rows
    assert {row.experiment for row in rows} == {name}
    assert len({row.row for row in rows}) == len(rows)
    for row in rows:
        assert row.ours is None or row.ours > 0 or row.unit == "%"  # a reduction may be none
        assert row.ours is not None or row.note.startswith("to be built"), (
            "a missing row says what it needs"
        )
        assert not (row.own and row.published is not None), "no paper publishes our own variants"


@pytest.mark.extended
def test_several_processes_give_the_results_of_one() -> None:
    chosen = select(["rollart-table3", "rollart-table4"])
    together = {done.experiment.name: done.rows for done in run(chosen, quick=True, processes=2)}
    one_process = {done.experiment.name: done.rows for done in run(chosen, quick=True, processes=1)}
    assert together == one_process
    assert all(one_process.values())


@pytest.mark.extended
def test_a_dying_process_fails_one_experiment() -> None:
    """The first experiment is unknown to a worker, which is a bug that kills it;
    another worker continues.
    """
    unknown = Experiment("rollart-none", "None", "None", lambda quick: [])
    done = {
        finished.experiment.name: finished
        for finished in run([unknown, *select(["rollart-table3"])], quick=True, processes=2)
    }
    assert "its process ended with code 1" in done["rollart-none"].error
    assert done["rollart-table3"].error == ""
    assert done["rollart-table3"].rows

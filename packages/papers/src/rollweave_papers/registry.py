"""All experiments by name, in the order of the papers.

Invariant: a name identifies one experiment; its part before the first hyphen names the
paper, and selects all of the paper's experiments.
"""

import difflib
from collections.abc import Sequence

from rollweave.schema.errors import ConfigError
from rollweave_papers import heddle, laminar, prorl, rollart, rose, rose_elastic, rose_serving
from rollweave_papers.rows import Experiment

EXPERIMENTS = {
    experiment.name: experiment
    for module in (rollart, laminar, heddle, rose, rose_serving, rose_elastic, prorl)
    for experiment in module.EXPERIMENTS
}

PAPERS = tuple(dict.fromkeys(name.partition("-")[0] for name in EXPERIMENTS))


def select(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names or papers, once each, in registry order;
    all if none is named. Raises ConfigError.
    """
    for name in names:
        if name not in EXPERIMENTS and name not in PAPERS:
            near = difflib.get_close_matches(name, [*EXPERIMENTS, *PAPERS], n=3)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else f": one of {', '.join([*PAPERS, *EXPERIMENTS])}"
            )
            raise ConfigError(f"NAME must be an experiment or a paper, got {name!r}{hint}")
    return [
        experiment
        for name, experiment in EXPERIMENTS.items()
        if not names or name in names or name.partition("-")[0] in names
    ]

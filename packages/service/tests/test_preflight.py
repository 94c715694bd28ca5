"""Checks of a service's configuration before it starts."""

import json
from pathlib import Path

import pytest

from packages.service.tests.rollout_service import service_config
from rollweave.engine.server_kinds import kind_of
from rollweave.runtime.preflight import dryrun
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_service.preflight import examine_service
from tests.support.engines import vllm_checkpoint


def test_sequences_beyond_the_context_are_refused_before_the_service_starts(
    tmp_path: Path,
) -> None:
    """Every rollout would fail otherwise. Registered engines may have another context,
    and a model that cannot be read here is none of this check's business.
    """
    directory = tmp_path / "model"
    directory.mkdir()
    model = vllm_checkpoint(directory)  # with a context of 512 tokens
    config = service_config(tmp_path)

    def with_limit(most: int, *, path: str = str(model)) -> RunConfig:
        first, *others = (task.model_dump(exclude_unset=True) for task in config.tasks)
        return RunConfig.model_validate(
            {
                **config.model_dump(exclude_unset=True),
                "tasks": [{**first, "max_tokens": most}, *others],
                "model": {"path": path},
            }
        )

    with pytest.raises(ConfigError) as error:
        examine_service(with_limit(513))
    assert str(error.value) == (
        "tasks.max_tokens: must be at most the model's context (512), got 513"
    )
    for fits in (with_limit(512), with_limit(513, path="x")):
        assert examine_service(fits) == (fits, [])
    elsewhere = with_limit(513)
    assert examine_service(elsewhere, registered=True) == (elsewhere, [])


def test_engines_of_a_kind_that_is_not_installed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = service_config(tmp_path)
    engines = [{"kind": "vllm", "python": "/no/python"}]
    config = RunConfig.model_validate({**config.model_dump(exclude_unset=True), "engines": engines})
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    kind_of.cache_clear()
    with pytest.raises(ConfigError, match=r"^engines\.kind vllm needs the package rollweave-serv"):
        examine_service(config)


def test_leaves_the_same_overlong_prompts_out_as_a_run(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    words = ["x" * 60 if number % 4 else "short" for number in range(40)]
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{n} {word}"}) for n, word in enumerate(words))
    )

    def with_limit(most: int) -> RunConfig:
        return loads(
            "[run]\nname = 'run'\n[model.scratch]\nhidden = 32\nlayers = 1\n[[tasks]]\n"
            f"env = 'jsonl'\nmax_tokens = {most}\n[tasks.options]\npath = '{path}'\n"
            "reward = 'math:sqrt'\noverlong = 'drop'\n",
            [f"run.dir={tmp_path}"],
        )

    with pytest.raises(ConfigError, match=r"tasks.0.max_tokens: .* 40 of 40 are not shorter"):
        examine_service(with_limit(8))
    served, (warning,) = examine_service(with_limit(40))
    assert examine_service(served) == (served, [])
    planned = dryrun.plan(with_limit(40))
    (check,) = [check for check in planned.checks if check.name == dryrun.LEFT_OUT]
    assert (served, warning) == (planned.config, check)

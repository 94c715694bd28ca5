"""The example of a user's package: it installs, is found by its entry point, and
fulfills the contract of an environment.
"""

import itertools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.envs.registry import names, resolve
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.schema.config.loading import load
from rollweave.schema.work import Purpose
from rollweave.train.scratch import CHAT_TEMPLATE, build_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_env"


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return the package as pip installs it: its modules on the path, its entry point
    in its metadata.
    """
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"elevator-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    announced = project["entry-points"]["rollweave.envs"].items()
    (metadata / "entry_points.txt").write_text(
        "\n".join(["[rollweave.envs]", *(f"{k} = {v}" for k, v in announced)])
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    resolve.cache_clear()
    yield
    resolve.cache_clear()
    sys.modules.pop("elevator", None)


@pytest.mark.usefixtures("announced")
def test_it_is_found_by_name_and_its_configuration_is_valid() -> None:
    assert "elevator" in names()
    config = load(EXAMPLE / "train.toml")
    of = TaskSource(config)
    env = resolve("elevator")()
    assert env.reset(of.draw("elevator", 0, Purpose.TRAIN)).messages[0].content.startswith(" at=")


@pytest.mark.usefixtures("announced")
def test_its_transcripts_are_made_of_its_words() -> None:
    of = TaskSource(load(EXAMPLE / "train.toml"))
    codec = ChatCodec(
        build_tokenizer(of.words()), ChatTemplate(CHAT_TEMPLATE, special={}, name="scratch")
    )
    for messages in itertools.islice(of.transcripts(seed=0), 20):
        assert {
            piece
            for token in tokenize_transcript(codec, messages).tokens
            if len(piece := codec.decode([token])) == 1
        } == {"\n"}


def test_its_own_tests_pass() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(EXAMPLE),
        str(EXAMPLE / "tests"),
    ]
    path = f"{EXAMPLE / 'src'}:{':'.join(entry for entry in sys.path if entry)}"
    done = subprocess.run(
        command,
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2

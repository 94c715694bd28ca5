"""Commands that get a model of the hub by its name."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from rollweave.io import hub as names
from rollweave.schema.config.loading import load
from tests.support.commands import CONFIG, invoke
from tests.support.hub_server import HubServer, commit_of
from tests.support.trainers import make_model

NAME = "org/small"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_model(tmp_path_factory.mktemp("hub") / "small")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = ("pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors")
    return found | dict.fromkeys((*others, "README.md"), b"x" * 1000)


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with HubServer(models={NAME: {"main": files}}) as server:
        _serve_at(server.url, monkeypatch)
        yield server


def _serve_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    close_session()
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def write(name: str = NAME) -> str:
    begin, end = CONFIG.index("[model.scratch]"), CONFIG.index("[[tasks]]")
    text = f'{CONFIG[:begin]}[model]\npath = "{name}"\n{CONFIG[end:]}'.replace(
        "steps = 2", "steps = 1"
    )
    Path("small.toml").write_text(text)
    return "small.toml"


def test_a_model_is_fetched_once_and_its_commit_kept(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_of(hub.repositories["models"][NAME]["main"])
    path = names.fetched(NAME)
    assert path == f"{NAME}@{commit}"
    folder = names.folder(path)
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == expected
    hub.repositories["models"][NAME] = {"main": {"a.json": b"{}", "model.safetensors": b"a"}}
    asked = len(hub.requests)
    assert names.fetched(path) == path
    assert len(hub.requests) == asked, "what is there needs no network"
    assert names.fetched(NAME) != path
    assert names.folder("a/folder") == Path("a/folder")
    Path("org").mkdir()
    assert names.fetched(path) == path, "a name with its commit is no folder's"
    assert not names.is_hub_name(f"{NAME}@refs/pr/1")


@pytest.mark.parametrize("folder", ["org/small", "org"])
def test_a_folder_takes_precedence(hub: HubServer, folder: str) -> None:
    Path(folder).mkdir(parents=True)
    assert names.fetched(NAME) == NAME
    assert names.fetched("/org/small") == "/org/small"
    assert names.fetched("./org/small") == "./org/small"
    assert hub.requests == []


def test_a_dry_run_needs_no_weights_and_a_run_fetches_them(hub: HubServer) -> None:
    path = write()
    code, text, errors = invoke("train", path, "--dry-run")
    assert (code, errors) == (0, [])
    assert "weights not checked: they are fetched when the run starts" in " ".join(text.split())
    assert {request.method for request in hub.asked("safetensors")} == {"HEAD"}
    assert not list(Path("runs").glob("*"))
    code, text, errors = invoke("train", path, "--inproc")
    assert code == 0, errors
    commit = commit_of(hub.repositories["models"][NAME]["main"])
    assert load(Path("runs/small/config.toml")).model.path == f"{NAME}@{commit}"
    digests = json.loads(Path("runs/small/run.json").read_text())["model"]
    assert "model.safetensors" in digests

    # the name means another commit now, but the run goes on with its model
    hub.repositories["models"][NAME] = {"main": {"config.json": b"{}"}}
    write(f"{NAME}@main")
    code, text, errors = invoke("train", path, "--resume", "--inproc", "--set", "run.steps=2")
    assert code == 0, errors
    assert f"{NAME}@main stays {NAME}@{commit}, with which the run began" in errors
    hub.status = 500
    code, text, errors = invoke("eval", "runs/small", "--inproc", "--episodes", "2")
    assert code == 0, errors


def test_a_partial_download_is_continued(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken["model.safetensors"] = 1
    with monkeypatch.context() as patch:
        known = iter([False])  # no other try, but the cause is known afterwards
        patch.setattr(names, "is_network", lambda error: next(known, True))
        code, _, (line,) = invoke("train", write(), "--inproc")
        assert code == 2
        assert "the next attempt continues what was downloaded" in line
    assert not Path("runs").exists()
    hub.broken.clear()
    hub.requests.clear()
    assert invoke("train", "small.toml", "--inproc")[0] == 0
    bodies = [request for request in hub.requests if request.method == "GET"]
    (again,) = (request for request in bodies if "model.safetensors" in request.path)
    assert again.headers["Range"].startswith("bytes=")


NOR = "(nor is there a folder of this name)"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "org/none",
            "must be a model of HUB, got 'org/none': it has none of this name, or none that your "
            "token (HF_TOKEN) may read",
        ),
        (
            "org/small@v9",
            "must name a revision that exists, got 'org/small@v9': HUB/org/small has no revision "
            "'v9'",
        ),
        (
            "org/gated",
            "must be a model that your token may read, got 'org/gated', which is gated: ask for "
            "access at HUB/org/gated, and set HF_TOKEN",
        ),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    hub: HubServer, files: dict[str, bytes], name: str, problem: str
) -> None:
    hub.repositories["models"]["org/gated"] = {"main": files}
    hub.gated.add("org/gated")
    text = f"{problem.replace('HUB', hub.url)} {NOR}"
    write(name)
    for command in (["train", "small.toml"], ["train", "small.toml", "--dry-run"]):
        code, _, errors = invoke(*command)
        assert (code, errors) == (2, [f"error: model.path {text}"])
    assert invoke("eval", "small.toml") == (2, "", [f"error: model.path {text}"])
    assert invoke("engine", name) == (2, "", [f"error: CHECKPOINT {text}"])
    assert not Path("runs").exists()


def test_no_network_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert invoke("train", write()) == (
            2,
            "",
            [
                "error: model.path must be in the cache in offline mode (HF_HUB_OFFLINE), got "
                f"'{NAME}', which is not {NOR}"
            ],
        )
    with monkeypatch.context() as patch:
        _serve_at("http://127.0.0.1:9", patch)
        code, _, (line,) = invoke("train", write())
        start = "model.path must be downloaded from http://127.0.0.1:9, which cannot be reached"
        assert (code, line.startswith(f"error: {start}, got '{NAME}' (")) == (2, True), line
    hub.status = 503
    code, _, (line,) = invoke("train", write())
    assert code == 2
    assert f"which answered with status 503, got '{NAME}'; the next attempt continues" in line


def test_a_model_without_safetensors_is_one_line(hub: HubServer, files: dict[str, bytes]) -> None:
    others = {name: content for name, content in files.items() if name != "model.safetensors"}
    hub.repositories["models"][NAME] = {"main": others}
    write()
    for command in (["train", "small.toml"], ["train", "small.toml", "--dry-run"]):
        code, _, (line,) = invoke(*command)
        assert (code, line.endswith(f"config.json, got '{NAME}', which has none")) == (2, True)
    assert not hub.asked("pytorch_model.bin")


def test_a_full_disk_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(names._Downloads, "_append", full)
    code, _, (line,) = invoke("train", write())
    assert code == 2
    assert line.startswith("error: model.path must fit on the disk of HF_HOME (")


def test_a_problem_that_is_not_known_is_one_line(hub: HubServer) -> None:
    Path("cache").write_text("a file in the place of the folder")
    code, _, (line,) = invoke("train", write())
    assert code == 2
    assert line.startswith(f"error: model.path must be readable, got '{NAME}': "), line

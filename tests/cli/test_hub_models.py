"""Commands that get a model of the hub by its name."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

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
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    hub.repositories["models"][NAME] = {"main": {"config.json": b"{}"}}
    asked = len(hub.requests)
    assert names.fetched(path) == path
    assert len(hub.requests) == asked, "what is there needs no network"
    assert names.fetched(NAME) != path
    assert names.folder("a/folder") == Path("a/folder")


def test_a_folder_takes_precedence(hub: HubServer) -> None:
    for folder in (NAME, "org", f"{NAME}@main"):
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
    assert not hub.asked("safetensors")
    assert not list(Path("runs").glob("*"))
    code, text, errors = invoke("train", path, "--inproc")
    assert code == 0, errors
    commit = commit_of(hub.repositories["models"][NAME]["main"])
    assert load(Path("runs/small/config.toml")).model.path == f"{NAME}@{commit}"
    digests = json.loads(Path("runs/small/run.json").read_text())["model"]
    assert "model.safetensors" in digests

    # the name means another commit now, but the run goes on with its model
    hub.repositories["models"][NAME] = {"main": {"config.json": b"{}"}}
    code, text, errors = invoke("train", path, "--resume", "--inproc", "--set", "run.steps=2")
    assert code == 0, errors
    hub.status = 500
    code, text, errors = invoke("eval", "runs/small", "--inproc", "--episodes", "2")
    assert code == 0, errors


def test_a_partial_download_is_continued(hub: HubServer) -> None:
    hub.broken["model.safetensors"] = 99
    code, _, errors = invoke("train", write(), "--inproc")
    assert (code, len(errors)) == (2, 1), errors
    assert errors[0].startswith(
        f"error: model.path must be a folder or a model of the hub, got '{NAME}': there is no "
        f"such folder, and {NAME} of {hub.url} cannot be fetched: "
    )
    assert not Path("runs").exists()
    hub.broken.clear()
    hub.requests.clear()
    assert invoke("train", "small.toml", "--inproc")[0] == 0
    (again,) = (r for r in hub.asked("model.safetensors") if r.method == "GET")
    assert again.headers["Range"].startswith("bytes=")
    assert not hub.asked("tokenizer.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("org/none", "org/none of HUB does not exist, or HF_TOKEN may not read it"),
        ("org/small@v9", "org/small of HUB has no revision v9"),
        (
            "org/gated",
            "org/gated of HUB is gated: accept its terms there, and set HF_TOKEN to a token of "
            "that user",
        ),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    hub: HubServer, files: dict[str, bytes], name: str, reason: str
) -> None:
    hub.repositories["models"]["org/gated"] = {"main": files}
    hub.gated.add("org/gated")
    for command in (
        ["train", write(name)],
        ["train", write(name), "--dry-run"],
        ["eval", "small.toml"],
    ):
        code, _, errors = invoke(*command)
        assert (code, errors) == (
            2,
            [
                "error: model.path must be a folder or a model of the hub, got "
                f"'{name}': there is no such folder, and {reason.replace('HUB', hub.url)}"
            ],
        )
    code, _, errors = invoke("engine", name)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith("error: CHECKPOINT must be a folder or a model of the hub")
    assert not Path("runs").exists()


def test_no_network_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    start = f"error: model.path must be a folder or a model of the hub, got '{NAME}': there is no"
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        code, _, (line,) = invoke("train", write())
        assert (code, line.startswith(start)) == (2, True)
        assert line.endswith(
            "HF_HUB_OFFLINE is set, and " + f"{constants.HF_HUB_CACHE} does not have all of it"
        )
    with monkeypatch.context() as patch:
        _serve_at("http://127.0.0.1:9", patch)
        code, _, (line,) = invoke("train", write())
        assert (code, line.startswith(start)) == (2, True)
        assert "Connection refused" in line or "connection" in line.lower()
    hub.status = 503
    code, _, (line,) = invoke("train", write())
    assert (code, line.startswith(start)) == (2, True)


def test_a_full_disk_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/cache/blobs/x")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    code, _, (line,) = invoke("train", write())
    assert code == 2
    assert line.endswith("cannot be fetched: No space left on device (/cache/blobs/x)")

"""Data sets of the hub: what is downloaded, kept and pinned, and each way in which that
fails.
"""

import errno
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from rollweave.cli.evaluate import subject_of
from rollweave.envs.base import Split
from rollweave.io import hub as downloads
from rollweave.record.rundir import RunDir
from rollweave.runtime.checkpoints import with_former_commits
from rollweave.runtime.preflight.dryrun import plan
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_envs import dataset as environment
from rollweave_envs.dataset import Dataset
from tests.support.hub_server import HubServer, commit_of
from tests.support.trainers import make_model

from .hub_data import GSM8K, gsm8k, parquet, use_home, use_hub

OPTIONS = {"path": "openai/gsm8k", "subset": "main", "reward": "gsm8k"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    use_home(tmp_path, monkeypatch)
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    with HubServer(datasets={"openai/gsm8k": {"main": gsm8k()}}) as server:
        use_hub(server, monkeypatch)
        yield server


def drawn(options: dict[str, Any], index: int = 0, split: Split = Split.TRAIN) -> Any:
    return Dataset.make_task(index=index, seed=1, split=split, options=options)


def test_a_data_set_is_pinned_and_then_needs_no_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = dict(Dataset.prepare(OPTIONS))
    commit = commit_of(hub.repositories["datasets"]["openai/gsm8k"]["main"])
    assert pinned == {**OPTIONS, "path": f"openai/gsm8k@{commit}"}
    environment._files_of.cache_clear()  # as a worker's process
    asked = len(hub.requests)
    task = drawn(pinned)
    assert Dataset(**pinned).reset(task).messages[0].content.startswith("What is ")
    assert "held_out.jsonl" in drawn(pinned, 0, Split.TEST).payload
    assert len(hub.requests) == asked


def test_a_run_keeps_its_commit_when_the_data_set_moves(hub: HubServer) -> None:
    pinned = dict(Dataset.prepare(OPTIONS))
    before = [drawn(pinned, index) for index in range(60)]
    files = {**gsm8k(), "main/train-0.parquet": parquet(GSM8K[:7])}
    hub.repositories["datasets"]["openai/gsm8k"] = {"main": files}
    environment._files_of.cache_clear()
    assert [drawn(pinned, index) for index in range(60)] == before
    assert Dataset.prepare(OPTIONS)["path"] == f"openai/gsm8k@{commit_of(files)}"
    assert Dataset.prepare(pinned) == pinned


def test_offline_mode_takes_what_was_loaded(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = Dataset.prepare(OPTIONS)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Dataset.prepare(OPTIONS) == pinned
    with pytest.raises(ConfigError, match=r"loaded before in offline mode .*got 'x/other'"):
        Dataset.prepare({**OPTIONS, "path": "x/other"})
    assert len(hub.requests) == asked


def test_a_broken_download_is_continued(hub: HubServer) -> None:
    hub.broken["train-0.parquet"] = 2
    Dataset.prepare(OPTIONS)
    size = len(gsm8k()["main/train-0.parquet"])
    ranges = [
        request.headers.get("Range")
        for request in hub.asked("main/train-0.parquet")
        if request.method == "GET"
    ]
    assert ranges == [None, f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]


def test_the_next_attempt_continues_a_partial_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = iter([False])  # no other try, but the cause is known afterwards
    monkeypatch.setattr(downloads, "is_network", lambda error: next(known, True))
    hub.broken["train-0.parquet"] = 1
    with pytest.raises(ConfigError, match="the next attempt continues what was downloaded"):
        Dataset.prepare(OPTIONS)
    hub.requests.clear()
    Dataset.prepare(OPTIONS)
    gets = [one for one in hub.asked("main/train-0.parquet") if one.method == "GET"]
    assert [one.headers["Range"] for one in gets] == [
        f"bytes={len(gsm8k()['main/train-0.parquet']) // 2}-"
    ]
    blobs = list(Path(constants.HF_HUB_CACHE).rglob("*.rollweave"))
    assert blobs == []


def test_a_file_that_arrives_damaged_is_refused_and_downloaded_again(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(downloads, "_digest", lambda file: "another")
        with pytest.raises(ConfigError, match="received with another digest"):
            Dataset.prepare(OPTIONS)
    Dataset.prepare(OPTIONS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"path": "openai/gsm9k"}, "options.path must be a data set of HUB, got 'openai/gsm9k'"),
        ({"path": "openai/gsm8k@v9"}, "options.path must name a revision that exists, got "
         "'openai/gsm8k@v9': HUB/datasets/openai/gsm8k has no revision 'v9'"),
        ({"path": f"openai/gsm8k@{'0' * 40}"}, "options.path must name a revision that exists"),
        ({"path": "x/gated"}, "options.path must be a data set that your token may read, got "
         "'x/gated', which is gated: ask for access at HUB/datasets/x/gated, and set HF_TOKEN"),
        ({"path": "x/none", "subset": ""}, "options.path must have data files"),
        ({"path": "x/bad", "subset": ""}, "options.path must be readable, got 'x/bad': "),
        ({"path": "x/empty", "subset": ""}, "options.split must be a split that has rows, got "
         "'train' of x/empty, which has none"),
        ({"subset": ""}, "options.subset must be one of main, socratic for 'openai/gsm8k', got ''"),
        ({"subset": "mian"}, "options.subset must be a subset of openai/gsm8k (main, socratic), "
         "got 'mian'; the nearest is 'main'"),
        ({"split": "tran"}, "options.split must be a split of openai/gsm8k (train, test), got "
         "'tran'; the nearest is 'train'"),
        ({"prompt": "qestion"}, "options.prompt must be a column of openai/gsm8k (question, "
         "answer), got 'qestion'; the nearest is 'question'"),
    ],
)  # fmt: skip
def test_what_the_hub_lacks_is_one_line(
    hub: HubServer, changes: dict[str, Any], problem: str
) -> None:
    hub.gated.add("x/gated")
    hub.repositories["datasets"] |= {
        "x/gated": {"main": gsm8k()},
        "x/none": {"main": {"README.md": b"no data"}},
        "x/bad": {"main": {"train.parquet": b"no Parquet"}},
        "x/empty": {"main": {"train.csv": b"prompt,answer\n"}},
    }
    with pytest.raises(ConfigError) as raised:
        Dataset.prepare({**OPTIONS, **changes})
    assert problem.replace("HUB", hub.url) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_token_opens_a_gated_data_set_and_is_sent_to_the_hub_alone(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add("openai/gsm8k")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    commit = str(Dataset.prepare(OPTIONS)["path"]).partition("@")[2]
    hub.requests.clear()
    hub.gated.clear()
    url = f"{hub.url}/datasets/openai/gsm8k/resolve/{commit}/README.md"
    of_files = downloads._Downloads("dataset", "openai/gsm8k", ())
    for number, location in enumerate((url, url.replace("127.0.0.1", "localhost"))):
        with open(tmp_path / str(number), "ab") as unfinished:
            of_files._append(location, url, unfinished, SimpleNamespace(update=bool))
    assert ["Authorization" in one.headers for one in hub.requests] == [True, False]


def test_a_run_goes_on_with_the_commit_that_was_checked(hub: HubServer, tmp_path: Path) -> None:
    task = {"env": "dataset", "tag": "a", "max_turns": 1, "max_tokens": 512, "options": OPTIONS}
    config = RunConfig.model_validate(
        {
            "run": {"name": "a"},
            "model": {"scratch": {}},
            "tasks": [task],
            "eval": {"final_episodes": 5},
        }
    )
    examined = plan(config, deep=False)
    commit = commit_of(hub.repositories["datasets"]["openai/gsm8k"]["main"])
    pinned = {**OPTIONS, "path": f"openai/gsm8k@{commit}"}
    assert examined.config.tasks[0].options == pinned

    # a run that resumes keeps it, even if its file names a branch by now
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    run.write_config(examined.config)
    for path in ("openai/gsm8k", "openai/gsm8k@main"):
        again = change(config, path, tmp_path)
        assert with_former_commits(again).tasks[0].options == pinned
    other = change(config, "openai/gsm8k@" + "0" * 40, tmp_path)
    assert with_former_commits(other) == other


def change(config: RunConfig, path: str, runs: Path) -> RunConfig:
    """Return the configuration of the same run with another name of its data set."""
    run = config.run.model_copy(update={"dir": str(runs)})
    task = config.tasks[0].model_copy(update={"options": {**OPTIONS, "path": path}})
    return config.model_copy(update={"run": run, "tasks": (task,)})


def test_one_failure_ends_all_downloads(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other files of the pool stop in the middle, and the others do not begin."""
    begun: list[str] = []
    waits = threading.Barrier(2, timeout=60)

    def append(self: Any, location: str, url: str, unfinished: Any, progress: Any) -> None:
        begun.append(location)
        waits.wait()
        if "train-0" in location:
            raise PermissionError("the disk refuses")
        assert self.ended.wait(60)

    monkeypatch.setattr(downloads._Downloads, "_append", append)
    monkeypatch.setattr(downloads, "DOWNLOADS", 2)
    files = hub.repositories["datasets"]["openai/gsm8k"]["main"]
    names = sorted(
        (name for name in files if "parquet" in name), key=lambda name: "train-0" in name
    )
    wanted = [(commit_of(files), name) for name in (names[0], names[-1], *names[1:-1])]
    with pytest.raises(PermissionError, match="the disk refuses"):
        downloads.download("dataset", "openai/gsm8k", wanted)
    assert len(begun) == 2
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.parquet"))


def test_files_with_equal_contents_are_downloaded_once(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    files = dict.fromkeys(("a.json", "b.json", "c.json"), b"{}")
    hub.repositories["models"]["x/y"] = {"main": {**files, "model.safetensors": b"w"}}
    assert downloads.fetched("x/y") == f"x/y@{commit_of({**files, 'model.safetensors': b'w'})}"
    assert "waiting for another" not in capfd.readouterr().err
    assert [one.method for one in hub.asked(".json")].count("GET") == 1


def test_a_dry_run_without_the_network_reads_what_another_has_fetched(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["models"]["x/y"] = {"main": {"a.json": b"{}", "model.safetensors": b"w"}}
    online = downloads.fetched("x/y", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert downloads.fetched("x/y", weights=False) == online
    with pytest.raises(ConfigError, match="in the cache in offline mode"):
        downloads.fetched("x/y")


def test_an_evaluation_is_named_after_the_model_and_its_commit(
    hub: HubServer, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    hub.repositories["models"]["x/small"] = {"main": files}
    subject = subject_of("x/small", env="frozenlake", overrides=[], checkpoint=None)
    commit = commit_of(files)
    assert subject.config.run.name == f"small-{commit[:7]}-frozenlake"
    assert subject.title == f"x/small@{commit}"


def test_a_refusal_of_the_hub_is_repeated_and_not_called_passing(hub: HubServer) -> None:
    hub.status = 400
    with pytest.raises(ConfigError) as raised:
        downloads.fetched("x/y")
    assert "which answered with status 400, got 'x/y' (" in str(raised.value)
    assert "the next attempt" not in str(raised.value)


def test_ctrl_c_ends_a_download_that_waits(tmp_path: Path) -> None:
    """Its threads do not keep the process: the one that waits here waits for ever."""
    code = (
        "import sys, threading\n"
        "from rollweave.io import hub\n"
        "def wait(*_):\n"
        "    print('waits', flush=True)\n"
        "    threading.Event().wait()\n"
        "hub._Downloads._download = wait\n"
        "hub.download('model', 'x/y', [('c', 'f')])\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waits\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert errors.splitlines()[-1] == b"KeyboardInterrupt"


def test_an_address_that_has_expired_is_asked_for_again(hub: HubServer) -> None:
    hub.storage = hub.url.replace("127.0.0.1", "localhost")
    hub.expired.add("train-0.parquet")
    Dataset.prepare(OPTIONS)
    asked = [one.method for one in hub.asked("main/train-0.parquet")]
    assert asked[:4] == ["HEAD", "GET", "HEAD", "GET"]


def test_a_download_waits_for_another_process_which_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = queue.SimpleQueue[str]()
    monkeypatch.setattr(downloads, "PAUSE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put))
    file = tmp_path / "unfinished"
    with ThreadPoolExecutor(1) as pool, open(file, "ab") as own:
        with open(file, "ab") as others:
            fcntl.flock(others, fcntl.LOCK_EX)
            of_files = downloads._Downloads("dataset", "x/y", ())
            locked = pool.submit(of_files._locked, own, "a.parquet")
            text = said.get(timeout=60)
        assert locked.result(60)
    assert text == "waiting for another process, which downloads a.parquet"


def test_no_network_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as raised:
        Dataset.prepare(OPTIONS)
    rule = "options.path must be downloaded from http://127.0.0.1:9, which cannot be reached"
    assert str(raised.value).startswith(f"{rule}, got 'openai/gsm8k' (")
    assert "\n" not in str(raised.value)


def test_a_hub_that_fails_is_one_line(hub: HubServer) -> None:
    hub.status = 500
    with pytest.raises(ConfigError, match=r"which answered with status 500, got"):
        Dataset.prepare(OPTIONS)


def test_a_full_disk_is_one_line_and_the_download_goes_on(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = downloads._Downloads._append

    def full(self: Any, location: str, url: str, unfinished: Any, progress: Any) -> None:
        append(self, location, url, unfinished, progress)
        unfinished.truncate(100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(downloads._Downloads, "_append", full)
        with pytest.raises(ConfigError) as raised:
            Dataset.prepare(OPTIONS)
    text = str(raised.value)
    assert text.startswith("options.path must fit on the disk of HF_HOME (")
    assert text.endswith("no space is left; the next attempt continues what was downloaded")
    hub.requests.clear()
    Dataset.prepare(OPTIONS)
    assert "bytes=100-" in [one.headers.get("Range") for one in hub.asked("train-0.parquet")]


CONFIG = """
[run]
name = "gsm8k"

[model.scratch]

[[tasks]]
env = "dataset"
tag = "gsm8k"
max_turns = 1
max_tokens = 512
max_turn_tokens = 256

[tasks.options]
path = "PATH"
subset = "main"
reward = "gsm8k"

[eval]
every = 0
final_episodes = 5
"""


def dry_run(folder: Path, hub: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which reads its environment."""
    (folder / "gsm8k.toml").write_text(CONFIG.replace("PATH", path))
    command = [sys.executable, "-m", "rollweave.cli.main", "train", "gsm8k.toml", "--dry-run"]
    variables = {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub, "COLUMNS": "400"}
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dry_run_downloads_and_checks_a_data_set(tmp_path: Path) -> None:
    with HubServer(datasets={"openai/gsm8k": {"main": gsm8k()}}) as server:
        result = dry_run(tmp_path, server.url, "openai/gsm8k")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "begins with 'What is " in result.stdout
    assert "all checks passed" in result.stdout
    assert result.stderr == ""


@pytest.mark.extended
def test_a_dry_run_of_a_wrong_name_ends_with_2(tmp_path: Path) -> None:
    with HubServer() as server:
        result = dry_run(tmp_path, server.url, "openai/gsm9k")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    rule = f"error: tasks.0: options.path must be a data set of {server.url}, got 'openai/gsm9k'"
    assert line.startswith(rule)

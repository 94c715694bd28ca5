"""The files beside a configuration: those that describe serving engines and hosts are
checked before a simulation or a dry run.
"""

import math
from pathlib import Path

import pytest

from rollweave.schema.config.loading import load_hosts, load_serving
from rollweave.schema.errors import ConfigError

USERS = 'model = "qwen3-8b"\nengines = 2\n'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("engines = 2\nrate = 1.0", ["model must be given unless sharing is serverless or spot"]),
        (USERS, ["rate must be given, or a trace in its place, got neither"]),
        (USERS + 'rate = 1.0\ntrace = "t"', ["rate must be given, or a trace in its place, got"]),
        (USERS + "rate = 1.0\nprefill = 2", ["prefill must be less than the 2 engines, got 2"]),
        (USERS + "rate = 0.0", ["rate must be above 0, got 0.0"]),
        (USERS + "rate = 1.0\nttft_s = 0.0", ["ttft_s must be above 0, got 0.0"]),
        (USERS + "rate = 1.0\nlease = 1.0", ["unknown key lease (did you mean lease_s?)"]),
        (
            USERS + 'rate = 1.0\nsharing = "serverless"',
            [
                "model must be left out with sharing serverless, whose engines have no users, got",
                "rate must be left out with sharing serverless, whose engines have no users, got",
            ],
        ),
        (
            'engines = 2\ntrace = "t"\nsharing = "serverless"',
            ["trace must be left out with sharing serverless, whose engines have no users, got t"],
        ),
        (
            'engines = 2\nprefill = 1\nsharing = "spot"',
            ["prefill must be left out with sharing spot, whose engines have no users, got 1"],
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "serving.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_serving(path)
    found = str(raised.value).splitlines()
    assert len(found) == len(lines)
    assert all(
        line.startswith(f"{path}: {start}") for line, start in zip(found, lines, strict=True)
    )


def test_engines_without_users_may_have_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "serving.toml"
    path.write_text('engines = 2\ntrace = "t"\nsharing = "spot"')
    assert not load_serving(path).has_users


GIB = 1 << 30


def read(tmp_path: Path, text: str) -> list[str]:
    """Return the lines of the error that reading the file raises."""
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_hosts(file)
    return [line.removeprefix(f"{file}: ") for line in str(raised.value).splitlines()]


def test_several_equal_hosts_have_numbered_names_and_gpus_in_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(
        '[[hosts]]\nname = "node"\ncount = 2\ncpus = 96\nmemory_gib = 512\nresources = { H20 = 8 }\n'
        'gpus = [{ kind = "A", memory_gib = 24 }, { kind = "B", count = 2, memory_gib = 47.5 }]\n'
        '[[hosts]]\nname = "plain"\ncpus = 4\nmemory_gib = 0.5\n'
    )
    hosts = load_hosts(file)
    assert list(hosts) == ["node-0", "node-1", "plain"]
    assert hosts["node-0"] == hosts["node-1"]
    node, plain = hosts["node-1"], hosts["plain"]
    assert (node.cpus, node.memory_bytes, dict(node.labels)) == (96, 512 * GIB, {"H20": 8})
    expected = [(0, "A", 24), (1, "B", 47.5), (2, "B", 47.5)]
    assert [(gpu.index, gpu.kind, gpu.memory_bytes / GIB) for gpu in node.devices] == expected
    assert (plain.devices, plain.memory_bytes) == ((), GIB // 2)


def test_an_unlimited_resource_is_what_an_agent_offers_without_an_amount(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(f"{HOST}resources = {{ fast = inf, slow = 2 }}")
    (host,) = load_hosts(file).values()
    assert host.labels == {"fast": math.inf, "slow": 2}


HOST = '[[hosts]]\nname = "a"\ncpus = 1\nmemory_gib = 1\n'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["hosts must be set, got nothing"]),
        ("hosts = []", ["hosts must have at least 1 of them, got []"]),
        ("[[hosts]", ["config must be valid TOML: Expected ']]'"]),
        (
            "[[hosts]]\ncpus = 0\nmemory_gib = true\n",
            [
                "hosts.0.name must be set",
                "hosts.0.cpus must be at least 1, got 0",
                "hosts.0.memory_gib must be a number, got True",
            ],
        ),
        (f"{HOST}gpu = 3", ["unknown key hosts.0.gpu (did you mean gpus?)"]),
        (
            f'{HOST}gpus = [{{ kind = "H20", memory = 1 }}]',
            [
                "hosts.0.gpus.0.memory_gib must be set",
                "unknown key hosts.0.gpus.0.memory (did you mean memory_gib?)",
            ],
        ),
        (f"{HOST}count = 1000000000", ["hosts.0.count must be at most 10000, got 1000000000"]),
        (f"{HOST}resources = {{ x = 0 }}", ["hosts.0.resources.x must be above 0, got 0"]),
        (f"{HOST}resources = {{ x = -inf }}", ["hosts.0.resources.x must be above 0, got -inf"]),
        (f"{HOST}resources = {{ x = nan }}", ["hosts.0.resources.x must be above 0, got nan"]),
        (f"{HOST}resources = {{ x = true }}", ["hosts.0.resources.x must be a number, got True"]),
        (HOST + HOST, ["hosts must have distinct names, got 'a' a second time"]),
        (
            f"{HOST}count = 2\n" + HOST.replace('"a"', '"a-1"'),
            ["hosts must have distinct names, got 'a-1' a second time"],
        ),
    ],
)
def test_a_malformed_file_gives_one_line_for_each_problem(
    tmp_path: Path, text: str, lines: list[str]
) -> None:
    problems = read(tmp_path, text)
    assert len(problems) == len(lines)
    assert all(one.startswith(line) for one, line in zip(problems, lines, strict=True)), problems


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: config must be a readable text file"):
        load_hosts(tmp_path / "nowhere.toml")

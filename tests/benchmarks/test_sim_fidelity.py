"""A simulation of a recorded run has the same steps, in a time that the measured engine
and trainer account for.
"""

from pathlib import Path

import msgspec

from benchmarks.sim.fidelity import simulate_again
from rollweave.schema.config.loading import load
from rollweave.sim.measured import read_timings
from rollweave.sim.profile import Profile, Sample
from rollweave.sim.workload import read_run
from tests.support.scripted_simulation import Scripted
from tests.support.simulation import one_domain


def profile(path: Path, *, scale: float) -> Path:
    """Return the profile of an engine each of whose steps takes `scale` seconds,
    regardless of its work.
    """
    samples = [
        Sample(
            prefill_tokens=tokens,
            prefill_context=tokens,
            decode=decode,
            decode_context=decode,
            seconds=scale,
        )
        for tokens in (0, 8)
        for decode in (0, 4)
    ]
    path.write_bytes(msgspec.json.encode(Profile(kv_tokens=1 << 16, samples=tuple(samples))))
    return path


def test_a_recorded_run_is_repeated_with_other_engines(tmp_path: Path) -> None:
    assert Scripted(one_domain("sync"), tmp_path / "run").run().error == ""
    config = load(tmp_path / "run" / "config.toml", [])
    live, work = (
        read_timings(tmp_path / "run" / "journal.bin", config),
        {"a": read_run(tmp_path / "run")},
    )
    repetitions = {}
    for name, scale in (("fast", 1e-4), ("slow", 1.0)):
        (tmp_path / name).mkdir()
        repetitions[name] = simulate_again(
            config, work, live, profile=profile(tmp_path / name / "p.json", scale=scale)
        )
    for again in repetitions.values():
        assert again.timings.steps == live.steps
        assert again.summary.error == ""
        assert 0 < again.computing <= 1
    assert repetitions["slow"].timings.wall_s > 2 * repetitions["fast"].timings.wall_s
    assert repetitions["slow"].computing > 10 * repetitions["fast"].computing

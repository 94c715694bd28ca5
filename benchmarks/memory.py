"""Bench `memory`: the estimate of a trainer's memory beside what it takes, for models
of three sizes and three values of `trainer.micro_tokens`, on a CPU in float32.

Each case is a separate process with the production trainer: it publishes, trains on
sequences that fill `micro_tokens`, writes a checkpoint beside the next step, and
publishes again. The peak counts the memory of this process and the memory files of the
published weights, mapped or not; it is sampled every 10 ms.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.batches import random_batch
from benchmarks.contract import Figure, Result
from rollweave.runtime.preflight.memory import rank_parts
from rollweave.schema.config.root import RunConfig
from rollweave.schema.training import Publish, Save, TrainOn
from rollweave.weights.checkpoint import read_shape

MODELS: Mapping[str, Mapping[str, int]] = {
    "7M": {"hidden": 256, "layers": 6, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 8192},
    "42M": {"hidden": 512, "layers": 10, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 24576},
    "135M": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152},
}
"""Size → the shape of a Llama with tied embeddings. The largest is that of
SmolLM2-135M.
"""

MICRO_TOKENS = (256, 512, 1024)
QUICK = (("7M", 256), ("7M", 512), ("42M", 256))
MEMBERS = 2
"""Number of trajectories of a step: one group."""

SAMPLE_S = 0.01
CASE_S = 900.0
"""Maximum seconds of one case."""

GIB = 1 << 30

CONDITIONS = {
    "estimate_over_peak": "bytes that the preflight check estimates for the trainer by the peak "
    "that was measured; 1 is exact",
    "off_by_max": "the largest distance of these ratios from 1",
    "dtype": "float32, CPU, Adam, all weights trained",
}


def bench_memory(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the ratio of estimate and peak for each case, and both in GiB."""
    figures: dict[str, Figure] = {}
    cases = QUICK if quick else tuple((name, micro) for name in MODELS for micro in MICRO_TOKENS)
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for name, micro in cases:
            path = Path(folder) / name
            if not path.exists():
                _save(path, **MODELS[name])
            measured = _measured(path, micro)
            case = f"{name}/{micro}"
            ratios.append(measured["estimate"] / measured["peak"])
            figures[f"estimate_over_peak/{case}"] = ratios[-1]
            figures[f"estimate_gib/{case}"] = measured["estimate"] / GIB
            figures[f"peak_gib/{case}"] = measured["peak"] / GIB
            progress(f"{case}: {ratios[-1]:.2f} of {measured['peak'] / GIB:.2f} GiB")
    figures["off_by_max"] = max(abs(ratio - 1) for ratio in ratios)
    return Result(bench="memory", figures=figures, conditions=dict(CONDITIONS))


def _measured(path: Path, micro: int) -> dict[str, int]:
    """Return the estimate and the peak of a case in bytes: it has its own process."""
    command = [sys.executable, "-m", "benchmarks.memory", str(path), str(micro)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=CASE_S, check=True)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


def _save(
    path: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> None:
    """Write a checkpoint with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


class _Watch:
    """Samples the memory of this process on a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak = max(self.peak, _resident() + _memory_files())


def _resident() -> int:
    """Return the bytes of this process in memory, without those of memory files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {key: rest for key, _, rest in (line.partition(":") for line in lines)}
    return sum(int(sizes[key].split()[0]) << 10 for key in ("RssAnon", "RssFile"))


def _memory_files() -> int:
    """Return the bytes of the open memory files."""
    found = dict[int, int]()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # it was closed meanwhile
    return sum(found.values())


def _run_case(path: Path, micro: int) -> dict[str, int]:
    from rollweave.train.trainer import Trainer

    config = RunConfig.model_validate(
        {
            "run": {"name": "memory", "steps": 9},
            "model": {"path": str(path)},
            "tasks": [
                {"env": "none", "max_tokens": micro, "max_turns": 1, "max_turn_tokens": micro // 2}
            ],
            "rollout": {"groups_per_step": 1, "group_size": MEMBERS},
            "trainer": {"micro_tokens": micro},
        }
    )
    shape = read_shape(path)
    parts = rank_parts(config, shape, rank=0)
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "weights").mkdir()
        trainer = Trainer(config, path, run)
        trainer.handle(Publish(version=0, publication_id=0, keep=(0,)))
        for step in range(2):
            batch = random_batch(step, vocab=shape.vocab, length=micro, groups=1, members=MEMBERS)
            trainer.handle(TrainOn(batch=batch))
            version = step + 1
            trainer.handle(Publish(version=version, publication_id=version, keep=(step, version)))
            if step == 0:
                trainer.handle(Save(path=str(run / "checkpoint"), export=True, background=True))
                trainer.write(lambda _: None)
        watch.stop()
    return {"estimate": sum(part.nbytes for part in parts), "peak": watch.peak}


if __name__ == "__main__":
    print(json.dumps(_run_case(Path(sys.argv[1]), int(sys.argv[2]))))

"""Bench `memory`: the estimate of a trainer's memory beside what it takes, for models
of three sizes and three values of `trainer.micro_tokens` in float32, and of the
largest in bfloat16, on a CPU.

Each case is a separate process with the production trainer: it publishes, trains on
sequences that fill `micro_tokens`, writes a checkpoint beside the next step, and
publishes again. The peak counts the memory of this process and the memory files of the
published weights, mapped or not; it is sampled every 10 ms.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from benchmarks.batches import random_batch
from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, program, scratch_folder
from rollweave.io.machine import computed_dtype
from rollweave.schema.config.root import RunConfig
from rollweave.schema.training import Publish, Save, TrainOn
from rollweave.train.needs import rank_needs
from rollweave.weights.checkpoint import read_shape

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = range(6)
MODELS: Mapping[str, tuple[int, ...]] = {
    "7M": (256, 6, 8, 4, 704, 8192),
    "42M": (512, 10, 8, 4, 1408, 24576),
    "135M": (576, 30, 9, 3, 1536, 49152),
}
"""Size → hidden width, layers, heads, KV heads, width of the MLP and vocabulary of a
Llama with tied embeddings. The largest is that of SmolLM2-135M.
"""

MICRO_TOKENS = (256, 512, 1024)
CASES = (
    *((name, micro, "float32") for name in MODELS for micro in MICRO_TOKENS),
    ("135M", 512, "bfloat16"),
)
QUICK = (("7M", 256, "float32"), ("7M", 512, "float32"), ("42M", 256, "bfloat16"))
MEMBERS = 2
"""Number of trajectories of a step: one group."""

SAMPLE_S = 0.01
CASE_S = 900.0
"""Maximum seconds of one case."""

GIB = 1 << 30


def bench_memory(*, quick: bool, progress: Progress) -> Result:
    """Return the ratio of estimate and peak for each case, both in GiB, and the largest
    distance of a ratio from 1.
    """
    figures: dict[str, Figure] = {}
    ratios = list[float]()
    with scratch_folder() as folder:
        for name, micro, dtype in QUICK if quick else CASES:
            path = folder / name
            if not path.exists():
                save_llama(path, MODELS[name])
            measured = program("benchmarks.memory", str(path), str(micro), dtype, limit_s=CASE_S)
            case = f"{name}/{micro}" + ("/bfloat16" if dtype == "bfloat16" else "")
            ratios.append(measured["estimate"] / measured["peak"])
            figures[f"estimate_over_peak/{case}"] = ratios[-1]
            figures[f"estimate_gib/{case}"] = measured["estimate"] / GIB
            figures[f"peak_gib/{case}"] = measured["peak"] / GIB
            progress(f"{case}: {ratios[-1]:.2f} of {measured['peak'] / GIB:.2f} GiB")
    figures["off_by_max"] = max(abs(ratio - 1) for ratio in ratios)
    conditions = {
        "estimate_over_peak": "bytes that the preflight check estimates by the measured peak",
        "dtype": "float32 where a case names no other, CPU, Adam, all weights trained",
        "bfloat16": f"computed in {computed_dtype('bfloat16', 'cpu')} on this CPU",
    }
    return Result(bench="memory", figures=figures, conditions=conditions)


def save_llama(path: Path, sizes: tuple[int, ...]) -> None:
    """Write a checkpoint with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=sizes[HIDDEN],
        num_hidden_layers=sizes[LAYERS],
        num_attention_heads=sizes[HEADS],
        num_key_value_heads=sizes[KV_HEADS],
        intermediate_size=sizes[FFN],
        vocab_size=sizes[VOCAB],
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


def _run_case(path: Path, micro: int, dtype: str) -> dict[str, int]:
    """Return the estimate and the peak of a case in bytes."""
    from rollweave.train.trainer import Trainer

    tokens = {"max_tokens": micro, "max_turns": 1, "max_turn_tokens": micro // 2}
    config = RunConfig.model_validate(
        {
            "run": {"name": "memory", "steps": 9},
            "model": {"path": str(path), "dtype": dtype},
            "tasks": [{"env": "none", **tokens}],
            "rollout": {"groups_per_step": 1, "group_size": MEMBERS},
            "trainer": {"micro_tokens": micro},
        }
    )
    shape = read_shape(path)
    needs = rank_needs(config, shape, rank=0)
    watch = _Watch()
    with scratch_folder() as run:
        (run / "weights").mkdir()
        trainer = Trainer(config, path)
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
    return {"estimate": sum(need.nbytes for need in needs), "peak": watch.peak}


if __name__ == "__main__":
    print(json.dumps(_run_case(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))

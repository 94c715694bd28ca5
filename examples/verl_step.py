"""verl trains on rollouts of a service, on a CPU or on GPUs.

verl's own training worker (its FSDP engine, GRPO's advantages, PPO's loss) takes the
steps; a `TrainedEngine` samples the rollouts of each step with the weights of the step
before. In two terminals, the first in `examples/chat`:

    rollweave serve sums.toml --registered --set model.path=CHECKPOINT
    python verl_step.py examples/chat/runs/sums-service CHECKPOINT --handler sums

verl 0.9.1 supports GPUs alone; `Cpu` is a platform of its plug-in interface. The
worker's Ray actor is left out: this program is the only rank.
"""

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rollweave import Decoding
from rollweave.schema.serving import EngineSpec
from rollweave_service import EngineRequest, RolloutRequest, Rollouts
from rollweave_service.adapters.engine import TrainedEngine
from rollweave_service.adapters.rows import Row, row_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("VERL_PLATFORM", "nvidia" if DEVICE == "cuda" else "cpu")

from tensordict import TensorDict  # noqa: E402 (verl reads its platform when it is imported)
from verl.plugin.platform import PlatformBase, PlatformRegistry  # noqa: E402


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):  # type: ignore[misc]
    """The CPU as a device of verl."""

    device_name = vendor_name = "cpu"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # a number would be that of an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "ROLLWEAVE_NO_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, lambda *_: 0)

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402


def training_worker(path: str, *, lr: float) -> Any:
    """Return verl's training worker with the model at `path` in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    if DEVICE == "cpu":
        EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(
            FSDPEngineWithLMHead
        )
    model = HFModelConfig(
        path=path,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=single, dtype="float32", use_torch_compile=False
    )
    optimizer = FSDPOptimizerConfig(lr=lr, weight_decay=0.0)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
        )
    )
    worker.reset()
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=8,
        optim=optimizer,
        engine=engine,
        use_torch_compile=False,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def batch_of(rows: list[Row], rewards: list[float], groups: list[int]) -> TensorDict:
    """Return rollouts as verl's batch: prompts padded on the left, responses on the
    right, with GRPO's advantages and the log-probs of the engine as the old ones.
    """
    prompt = max(len(row.prompt) for row in rows)
    response = max(len(row.completion) for row in rows)

    def left(values: list[int]) -> list[int]:
        return [0] * (prompt - len(values)) + values

    def right(values: list[Any]) -> list[Any]:
        return [*values, *[0] * (response - len(values))]

    prompts = torch.tensor([left(row.prompt) for row in rows])
    responses = torch.tensor([right(row.completion) for row in rows])
    mask = torch.tensor([right(row.mask) for row in rows])
    attention = torch.tensor(
        [left([1] * len(row.prompt)) + right([1] * len(row.completion)) for row in rows]
    )
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(rows)), mask.cumsum(1).argmax(1)] = torch.tensor(rewards)
    advantages, _ = compute_grpo_outcome_advantage(scores, mask, index=groups)
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "old_log_probs": torch.tensor([right(row.logprobs) for row in rows]),
            "advantages": advantages,
        },
        batch_size=len(rows),
    )


def train(worker: Any, batch: TensorDict) -> dict[str, Any]:
    """Take one step of the optimizer, as verl's trainer does; return its metrics."""
    size = len(batch)
    data = left_right_2_no_padding(batch)
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=size,
        mini_batch_size=size,
        micro_batch_size_per_gpu=8,
        use_dynamic_bsz=False,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    metrics: dict[str, Any] = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
    return metrics


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a parameter that FSDP has divided."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", help="directory or address of the service")
    parser.add_argument("model", help="directory of the checkpoint that it serves")
    parser.add_argument("--handler", required=True, help="tag of the task domain")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-5)
    given = parser.parse_args()
    worker = training_worker(given.model, lr=given.lr)
    spec = EngineSpec(id="trained", model=given.model, device=DEVICE)
    with Rollouts(given.service) as rollouts, TrainedEngine(spec) as engine:
        rollouts.register(
            EngineRequest(address=engine.address, token=engine.token, dialect="rollweave")
        )
        for step in range(1, given.steps + 1):
            began = time.monotonic()
            first = (step - 1) * given.groups
            asked = [
                RolloutRequest(
                    handler=given.handler,
                    index=index,
                    members=given.members,
                    sampling=Decoding(temperature=1.0),
                )
                for index in range(first, first + given.groups)
            ]
            rows, rewards, groups = [], [], []
            for group, status in enumerate(rollouts.run(asked)):
                for member in status.members:
                    result = member.result
                    row = None if result is None else row_of(result.sequences[0])
                    if row is not None and result.reward is not None:
                        rows.append(row)
                        rewards.append(result.reward)
                        groups.append(group)
            sampled = time.monotonic()
            metrics = train(worker, batch_of(rows, rewards, groups))
            state = worker.engine.module.state_dict()
            parameters = [(name, whole(value)) for name, value in state.items()]
            engine.update(parameters, version=step)
            trained = {name: values[0] for name, values in metrics.items()}
            print(
                f"step {step}: reward {sum(rewards) / len(rewards):.3f} over {len(rows)} rollouts, "
                f"{sampled - began:.1f} s of rollouts, {time.monotonic() - sampled:.1f} s of "
                f"training, gradient norm {trained['grad_norm']:.3f}, KL between trainer and "
                f"engine {trained['actor/ppo_kl']:.1e}"
            )


if __name__ == "__main__":
    main()

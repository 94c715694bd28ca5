"""Start the processes of a run on its hosts: the engines, the trainer, relays, rollout
workers and the predictor of lengths.

Only this module decides what runs in which process, with which share of its host.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollweave.core.policy.places import most_rolled_out
from rollweave.core.policy.scheduling import scheduling
from rollweave.engine.clients.client import EngineClient, in_process, in_thread
from rollweave.engine.server_kinds import ENGINE_TOKEN
from rollweave.io.child import Spawn
from rollweave.io.http.guard import server_token
from rollweave.record.rundir import RunDir, run_id
from rollweave.runtime.hosts.hosts import LOOPBACK, Hosts
from rollweave.runtime.recover import model_dir
from rollweave.runtime.roles.group import WorkerPlace
from rollweave.runtime.supervisors.predictor import PredictorLink, ProcessPredictor, ThreadPredictor
from rollweave.runtime.supervisors.relays import OnStalled, OnSuspected, RelayLink
from rollweave.runtime.supervisors.trainer_link import (
    ProcessTrainer,
    ThreadTrainer,
    TrainerBackend,
    TrainerSpec,
)
from rollweave.runtime.supervisors.workers import OnReport, WorkerLink
from rollweave.schema.config.engines import BLOCK_TOKENS, EngineConfig
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import TRAINER_THREADS
from rollweave.schema.events import EngineSlot
from rollweave.schema.hosts import Program, RankSlot, Share
from rollweave.schema.roles import RolesAddress
from rollweave.schema.rollouts import WorkerSpec
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.schema.training import PredictorReport, PredictorSpec
from rollweave.schema.weights import RelaySpec

BACKSTOP = 2.0
"""Ratio of our own time limits on a silent child to the core's: the core acts first,
and gives its own reason.
"""


def waiting_limit(config: RunConfig) -> int:
    """Return the `waiting_limit` of `rollout/worker.py`."""
    return most_rolled_out(config.rollout.places)


class Processes:
    """Starts the engines, trainers, relays, rollout workers and predictors of one run.

    If a model from scratch does not exist yet, the first trainer builds it.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        hosts: Hosts,
        *,
        words: tuple[str, ...],
        inproc: bool,
        on_ready: Callable[[], None],
        version: int = -1,
        deployed: Mapping[str, str] = MappingProxyType({}),
        roles: RolesAddress | None = None,
    ) -> None:
        """`on_ready` is called whenever a trainer is ready. `deployed` is as in
        `rollout/rewards.py`. Rollout workers call the roles of the run at `roles`.

        `version` is the version that engines report for the model's own weights.
        """
        self._version, self.deployed, self._roles = version, dict(deployed), roles
        self._config, self._run, self._words, self._inproc = config, run, words, inproc
        self.hosts = hosts
        self._on_ready = on_ready
        self.model_dir = model_dir(config, run)
        self._model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.model_dir.exists():
            self._model_ready.set_result(None)

    def engine(self, slot: EngineSlot, epoch: int) -> EngineClient:
        """Start epoch `epoch` of an engine. Raises OSError."""
        engine_id, watchdog = slot.id, self._config.watchdog
        host, kind = self.hosts.host(slot.host), self._config.engines[slot.group].server
        spec = engine_spec(
            self._config, self._run, slot, version=self._version, kv_host=host.address
        )
        if self._inproc and kind is None:
            # torch stays out of a controller that does not need it
            from rollweave.engine.thread import EngineThread

            link = in_thread(spec, EngineThread, model_ready=self._model_ready)
        else:
            program, threads = Program.ENGINE, slot.degree
            if kind is not None:
                program, threads = Program.SERVER_ENGINE, 1
            link = in_process(
                spec,
                spawn=host.starting(program, _share(threads, slot.devices)),
                log=self._run.logs / f"{engine_id}.log",
                model_ready=self._model_ready,
            )
        name = f"engine {engine_id}.{epoch}"
        return EngineClient(
            name, link, start_s=BACKSTOP * watchdog.start_s, reply_s=BACKSTOP * watchdog.weights_s
        )

    def trainer(self, epoch: int, fresh: bool, ranks: Sequence[RankSlot]) -> TrainerBackend:
        """Start a trainer with these ranks. If it is `fresh`, it is not restored, and
        warms up.

        Raises OSError.
        """
        spec = TrainerSpec(
            config=self._config.model_dump_json(),
            model=str(self.model_dir),
            words=self._words,
            warm_up=fresh,
        )
        start_s = BACKSTOP * self._config.watchdog.start_s
        if self._inproc:
            from rollweave.runtime.entrypoints.trainer import build

            return ThreadTrainer(spec, build, start_s=start_s, on_ready=self._trainer_ready)
        return ProcessTrainer(
            spec,
            places=[self._rank(slot) for slot in ranks],
            logs=self._run.logs,
            start_s=start_s,
            on_ready=self._trainer_ready,
        )

    def _rank(self, slot: RankSlot) -> WorkerPlace:
        host = self.hosts.host(slot.host)
        share = _share(TRAINER_THREADS, slot.devices)
        return WorkerPlace(spawn=host.starting(Program.TRAINER, share), address=host.address)

    def worker(self, worker_id: str, host_number: int, on_report: OnReport) -> WorkerLink:
        """Start a rollout worker. Raises OSError."""
        host = self.hosts.host(host_number)
        is_cluster = self._config.cluster is not None
        shared = {"host": host.name, "address": host.address} if is_cluster else {}
        spec = WorkerSpec(
            id=worker_id,
            run_id=run_id(self._run.identity),
            deployed=self.deployed,
            roles=self._roles,
            config=self._config.model_dump_json(),
            model_dir=str(self.model_dir),
            logs=str(self._run.logs / worker_id),
            waiting_limit=waiting_limit(self._config),
            **shared,
        )
        return WorkerLink(
            spec,
            on_report,
            spawn=host.starting(Program.WORKER, Share()),
            log=self._run.logs / f"{worker_id}.log",
            start_s=BACKSTOP * self._config.watchdog.start_s,
        )

    def relay(
        self, spawn: Spawn, spec: RelaySpec, on_suspected: OnSuspected, on_stalled: OnStalled
    ) -> RelayLink:
        """Start a relay by `spawn`. Raises OSError."""
        return RelayLink(
            spec,
            on_suspected,
            on_stalled,
            spawn=spawn,
            log=self._run.logs / f"{spec.id}.log",
            start_s=BACKSTOP * self._config.watchdog.start_s,
        )

    def predictor(self, on_report: Callable[[PredictorReport], None]) -> PredictorLink:
        """Start the predictor of lengths, whose reports go to `on_report`. Raises
        OSError.

        The predictor `lm` uses the run's own model to embed text.
        """
        name = self._config.ablation.predictor
        spec = PredictorSpec(
            regressor=name, checkpoint=str(self.model_dir) if name == "lm" else None
        )
        if self._inproc:
            return ThreadPredictor(spec, on_report)
        return ProcessPredictor(spec, on_report, log=self._run.logs / "predictor.log")

    def _trainer_ready(self) -> None:
        if not self._model_ready.done():
            self._model_ready.set_result(None)
        self._on_ready()


def _share(threads: int, devices: tuple[int, ...]) -> Share:
    """Return the share of a process that uses these GPUs if there are any."""
    return Share(threads=threads, devices=devices or None)


def engine_spec(
    config: RunConfig,
    run: RunDir,
    slot: EngineSlot,
    *,
    version: int = -1,
    kv_host: str = str(LOOPBACK),
) -> EngineSpec:
    """Return the settings of an engine, which listens for KV at `kv_host`. `version` is
    the version that it reports for the model's own weights.

    Raises ConfigError if the token of a server that already runs cannot be read.
    """
    group, without = config.engines[slot.group], config.ablation.without
    device = config.model.device
    if group.server is not None and device == "auto":
        device = "cuda" if slot.devices else "cpu"  # the engine's process has no torch
    return EngineSpec(
        id=slot.id,
        model=str(model_dir(config, run)),
        device=device,
        dtype=config.model.dtype,
        threads=slot.degree,
        max_slots=group.most_slots,
        slots_context=config.profiled_context if group.max_slots == "profiled" else 0,
        kv_tokens=group.kv_tokens,
        block_tokens=BLOCK_TOKENS,
        prefill_chunk_tokens=group.prefill_chunk_tokens,
        prefix_cache="prefix_cache" not in without,
        deterministic=group.deterministic,
        version=version,
        # placement by length rank, allocation and consolidation need the measured cost
        # of steps
        profile=scheduling(config.rollout, config.ablation).by_rank
        or config.allocation is not None
        or config.rollout.mode is ModeName.DECOUPLED,
        # not in a service, whose engines serve the model's own weights
        released=config.trainer.colocated and version < 0,
        kv_host=kv_host,
        cuda_graphs="cuda_graphs" not in without,
        lora_scale=None if config.lora is None else config.lora.scale,
        routes=config.algorithm.routing_replay,
        states=scheduling(config.rollout, config.ablation).predicts
        and config.ablation.predictor == "policy",
        server=_server_spec(config, group, slot, run),
    )


def _server_spec(
    config: RunConfig, group: EngineConfig, slot: EngineSlot, run: RunDir
) -> ServerSpec | None:
    """Return the inference server of an engine; None if it is embedded."""
    if group.server is None:
        return None
    attached: dict[str, Any] = {}
    if group.address:
        attached = {
            "addresses": group.address,
            "token": server_token(ENGINE_TOKEN),
            "holder": f"{socket.gethostname()}:{run.path.absolute()}",
            "context": config.max_tokens,
        }
    return ServerSpec(
        kind=group.server,
        python=group.python,
        args=group.args,
        scaled_logprobs=config.scales_logprobs,
        degree=slot.degree,
        start_s=config.watchdog.start_s,
        moves_kv=group.phase != "both",
        control_s=config.watchdog.weights_s / 2,
        collective=config.weights.collective,
        **attached,
    )

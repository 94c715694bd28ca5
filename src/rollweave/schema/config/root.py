"""The user's configuration: one TOML file, read into `RunConfig`. Unknown keys and
broken rules are errors.

Every setting has a sentence in its section, in the module of its subject beside this
one; `schema/config/conflicts.py` has the settings that exclude each other, and this
module the rules between their values. `schema/config/loading.py` reads files and
overrides into a `RunConfig`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from pydantic import ValidationInfo, model_validator

from rollweave.schema.config.conflicts import conflicts
from rollweave.schema.config.engines import AllocationConfig, EngineConfig
from rollweave.schema.config.rollout import ModeName, RewardConfig
from rollweave.schema.config.sections import Sections
from rollweave.schema.config.training import GROUPLESS, OF_CRITIC, VLLM_HEAD_DIM
from rollweave.schema.errors import FieldError, FieldErrors
from rollweave.schema.text import did_you_mean

CHECKED = object()
"""Context of the validation of a configuration whose rules were checked before."""


class RunConfig(Sections):
    @classmethod
    def checked(cls, text: str) -> Self:
        """Read what another process of the run has checked, completed and written as
        JSON.
        """
        return cls.model_validate_json(text, context=CHECKED)

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Self:
        if info.context is not CHECKED and (errors := [*self.broken_rules()]):
            raise FieldErrors(errors)
        return self

    def broken_rules(self) -> Iterator[FieldError]:
        """Yield an error for each rule between settings that does not hold."""
        yield from conflicts(self)
        yield from self._of_tasks()
        yield from self._of_rewards()
        yield from self._of_pools()
        yield from self._of_roles()
        for number, group in enumerate(self.engines):
            yield from self._of_engines(number, group)
        yield from self._of_phases()
        if self.allocation is not None:
            yield from self._of_allocation(self.allocation)
        if self.model.device == "cuda" and self.sim is None:
            yield from self._on_gpus(range(len(self.engines)))

    def check_on_gpus(self, groups: Iterable[int]) -> None:
        """Raise FieldErrors for settings that are impossible on GPUs, on which these
        groups of engines run.
        """
        if errors := [*self._on_gpus(groups)]:
            raise FieldErrors(errors)

    def _of_tasks(self) -> Iterator[FieldError]:
        rollout = self.rollout
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            yield FieldError("tasks", "have distinct names (set tag)", names)
        if rollout.mode is ModeName.BOUNDED and rollout.alpha == 0:
            rule = "be at least 1 in mode bounded (0 is mode sync)"
            yield FieldError("rollout.alpha", rule, rollout.alpha)
        for name in names:
            algorithm, size = self.algorithm_of(name), self.group_size(name)
            advantage = algorithm.advantage
            rewarded = algorithm.reward_weight and advantage == "distill"
            if (rewarded or advantage not in GROUPLESS) and size < 2:
                section = name if name in self.own_group_sizes() else "rollout"
                which = f"{advantage} with a reward_weight" if rewarded else advantage
                yield FieldError(f"{section}.group_size", f"be at least 2 for {which}", size)
        if self.teacher is None and any(self.distills(name) for name in names):
            yield FieldError("teacher.url", "be given with algorithm.advantage distill", "none")
        others = {self.algorithm_of(name).advantage for name in names} - OF_CRITIC
        if self.buffer.sample == "td_error" and others:
            rule = f"not be td_error unless all task domains have {' or '.join(sorted(OF_CRITIC))}"
            yield FieldError("buffer.sample", rule, f"td_error with {', '.join(sorted(others))}")
        for name, rule, got in self._of_ranks():
            yield FieldError(f"trainer.{name}", rule, got)

    def _of_ranks(self) -> Iterator[tuple[str, str, object]]:
        """Yield settings of the trainer's ranks, each with the rule that it breaks, and
        its value.
        """
        trainer, engines = self.trainer, sum(group.count for group in self.engines)
        first, most = trainer.first_ranks, trainer.most_ranks
        if first % trainer.tensor_parallel:
            rule = f"divide trainer.ranks ({first})"
            yield "tensor_parallel", rule, trainer.tensor_parallel
        if most < first:
            yield "ranks.minimum", f"be at most the maximum ({most})", first
        elif trainer.elastic and len(self.engines) > 1:
            yield "ranks", "be a number unless one group has all engines", trainer.ranks
        elif trainer.elastic and most >= first + engines:
            rule = f"be at most {first + engines - 1}, so that an engine remains of {engines}"
            yield "ranks.maximum", rule, most

    def _of_rewards(self) -> Iterator[FieldError]:
        names, domains = [one.name for one in self.rewards], [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            yield FieldError("rewards", "have distinct names", names)
        cluster, owners = self.cluster, dict[str, str]()
        for number, reward in enumerate(self.rewards):
            field = f"rewards.{number}"
            named = reward.name if reward.url is not None else ""
            if named and (owner := owners.setdefault(reward.token_variable, named)) != named:
                rule = f"differ from {owner} in more than case, - and _, since each has its token"
                yield FieldError(f"{field}.name", rule, named)
            for domain in reward.tasks:
                if domain not in domains:
                    rule = f"be among the task domains {domains}"
                    hint = did_you_mean(domain, domains)
                    yield FieldError(f"{field}.tasks", rule, f"{domain!r}{hint}")
            remote = cluster is not None and cluster.launcher == "manual"
            if reward.deployed and self.workers.maximum and remote:
                rule = (
                    "not be serverless unless cluster.launcher is ray, for a function that "
                    "rollout workers on other hosts call"
                )
                yield FieldError(f"{field}.run", rule, "launcher manual")
            if reward.pairwise:
                yield from self._of_opponents(f"{field}.judge.pairwise", reward)

    def _of_opponents(self, field: str, reward: RewardConfig) -> Iterator[FieldError]:
        """Check that the groups of a pairwise judge have several members."""
        for domain in reward.tasks or [task.name for task in self.tasks]:
            if (size := self.group_size(domain)) < 2:
                rule = "be false for groups of fewer than 2 members to compare"
                yield FieldError(field, rule, f"group_size {size} of {domain}")

    def _of_pools(self) -> Iterator[FieldError]:
        """Check that every named pool exists, and that there are enough engines for
        relays.
        """
        named = {
            "trainer.pool": self.trainer.pool,
            "workers.pool": self.workers.pool,
            **{f"roles.{name}.pool": role.pool for name, role in self.roles.items()},
            **{f"engines.{n}.pool": group.pool for n, group in enumerate(self.engines)},
            **{f"tasks.{n}.pool": task.pool for n, task in enumerate(self.tasks)},
            **{
                f"pools.{name}.fallback": other
                for name, pool in self.pools.items()
                for other in pool.fallback
            },
        }
        for field, name in named.items():
            yield from _unknown_pool(field, name, "the pools", list(self.pools))
        of_engines = list(dict.fromkeys(group.pool for group in self.engines if group.pool))
        for number, task in enumerate(self.tasks):
            if task.pool in self.pools:
                field = f"tasks.{number}.pool"
                yield from _unknown_pool(field, task.pool, "the pools of engines", of_engines)
        own = sum(group.count for group in self.engines)
        engines = self.allocation.budget if self.allocation is not None else own
        if self.weights.relays > engines:
            yield FieldError(
                "weights.relays", f"be at most the engines ({engines})", self.weights.relays
            )

    def _of_roles(self) -> Iterator[FieldError]:
        """Check that roles of judges have no class and no arguments, and all others a
        class.
        """
        judges = [reward.name for reward in self.rewards if reward.embedded]
        for name, role in self.roles.items():
            if bool(role.cls) == (name in judges):
                rule = f"be left out for the judge of reward {name}"
                if not role.cls:
                    known = f"a reward with a judge without url ({', '.join(judges) or 'none'})"
                    rule = f"be given unless the role has the name of {known}"
                yield FieldError(f"roles.{name}.cls", rule, role.cls or "none")
            elif role.arguments and not role.cls:
                rule = f"be left out for the judge of reward {name}"
                yield FieldError(f"roles.{name}.arguments", rule, role.arguments)

    def _of_engines(self, number: int, group: EngineConfig) -> Iterator[FieldError]:
        field, scratch = f"engines.{number}", self.model.scratch
        if self.max_tokens > group.kv_tokens:
            rule = f"hold one trajectory ({self.max_tokens} tokens)"
            yield FieldError("engines.kv_tokens", rule, group.kv_tokens)
        if group.kind == "vllm" and scratch is not None and scratch.hidden % (2 * VLLM_HEAD_DIM):
            rule = f"be a multiple of {2 * VLLM_HEAD_DIM} with engines of kind vllm"
            yield FieldError("model.scratch.hidden", rule, scratch.hidden)
        if not group.address:
            return
        if group.count != len(group.address):
            rule = f"be the number of addresses ({len(group.address)}) or left out"
            yield FieldError(f"{field}.count", rule, group.count)
        addresses = [address for other in self.engines for address in other.address]
        for address in dict.fromkeys(group.address):
            if (times := addresses.count(address)) > 1:
                rule = "name each server once in all [[engines]]"
                yield FieldError(f"{field}.address", rule, f"{address} {times} times")

    def _of_phases(self) -> Iterator[FieldError]:
        """Check that prompts can be computed on one engine for another."""
        phases = [group.phase for group in self.engines]
        split = {number: phase for number, phase in enumerate(phases) if phase != "both"}
        for number, phase in split.items():
            other = "decode" if phase == "prefill" else "prefill"
            rule = f"be both unless other engines have phase {other}"
            beside = other in phases
            if phase == "either":
                rule = "be both unless one group has all engines, at least 2"
                beside = len(phases) == 1 and self.engines[number].count > 1
            if not beside:
                yield FieldError(f"engines.{number}.phase", rule, phase)
        for name in ("kind", "deterministic"):
            values = [getattr(self.engines[number], name) for number in split]
            if len(set(values)) > 1:
                rule = "be the same for all prefill and decode engines, which exchange KV"
                yield FieldError(f"engines.{name}", rule, values)

    def _of_allocation(self, allocation: AllocationConfig) -> Iterator[FieldError]:
        if max(self.degrees) > allocation.budget:
            rule = f"be at least twice engines.degree ({self.engines[0].degree})"
            yield FieldError("allocation.budget", rule, allocation.budget)
        if len(self.engines) > 1 or "count" in self.engines[0].model_fields_set:
            rule = "be one group without count where [allocation] decides it"
            given = [{"count": group.count} for group in self.engines]
            yield FieldError("engines", rule, given)

    def _on_gpus(self, groups: Iterable[int]) -> Iterator[FieldError]:
        """Check groups of engines that run on GPUs: an embedded engine has one."""
        numbers, device = list(groups), self.model.device
        if numbers and self.allocation is not None and self.cluster is not None:
            rule = (
                f"be left out with [cluster] on {device}: the GPUs of an engine are on one host, "
                "and the plan does not know which hosts have enough"
            )
            yield FieldError("allocation", rule, self.allocation)
        embedded = [self.engines[number] for number in numbers]
        embedded = [group for group in embedded if group.kind == "embedded"]
        if embedded and self.allocation is not None:
            rule = f"be left out on {device}: an embedded engine has one GPU"
            yield FieldError("allocation", rule, self.allocation)
        for group in embedded:
            if group.degree > 1:
                rule = f"be 1 on {device} (an embedded engine has one GPU)"
                yield FieldError("engines.degree", rule, group.degree)


def _unknown_pool(
    field: str, name: str | None, what: str, known: Sequence[str]
) -> Iterator[FieldError]:
    if name is not None and name not in known:
        rule = f"be one of {what} {list(known)}"
        yield FieldError(field, rule, f"{name!r}{did_you_mean(name, known)}")

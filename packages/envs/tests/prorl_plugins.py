"""Plug-ins in the form of ProRL Agent's server, which import nothing of ours."""

import asyncio
import json
import threading
import urllib.request
from typing import Any


class Runtime:
    """A container, as far as plug-ins and their server see it."""

    def __init__(self) -> None:
        self.closed = 0
        self.gone = threading.Event()
        self.event_stream = None

    def close(self) -> None:
        self.closed += 1
        self.gone.set()


class Reward:
    """The client of a reward server."""

    async def get_reward(self, instance: dict[str, Any], response: str) -> dict[str, Any]:
        right = response == instance["answer"]
        return {"resolved": right, "reward": 2.0 if right else 0.25}


class Asking:
    """Asks its question over HTTP with a call that blocks, and compares the answer."""

    name = "asking"

    def __init__(self) -> None:
        self.runtimes: list[Runtime] = []
        self.threads: list[str] = []
        self.failures: list[str] = []

    async def init(self, job_details: Any, sid: str | None = None) -> tuple[Any, Any, Any]:
        assert sid == job_details.job_id
        self.threads.append(threading.current_thread().name)
        self.runtimes.append(Runtime())
        config = {"base_url": job_details.llm_config.base_url}  # a copy from before `run`
        return self.runtimes[-1], {"max_iterations": 3}, config

    async def run(self, job_details: Any, sid: str | None = None) -> dict[str, Any]:
        assert job_details.runtime is self.runtimes[-1]
        messages = [{"role": "user", "content": job_details.instance["question"]}]
        answer = ask(job_details, messages)
        return {"success": True, "messages": [*messages, answer], "answer": answer["content"]}

    async def eval(
        self,
        job_details: Any,
        sid: str | None = None,
        allow_skip: bool = True,
        reward: Any = None,
    ) -> dict[str, Any]:
        assert sid == f"eval_{job_details.job_id}"
        assert allow_skip
        assert self.runtimes[-1].closed == 1
        answer = job_details.run_results["answer"]
        if reward is not None:
            return {"report": await reward.get_reward(job_details.instance, answer)}
        return {"resolved": answer == job_details.instance["answer"]}

    def init_exception(self, job_details: Any, exception: Exception) -> dict[str, Any]:
        self.failures.append(str(exception))
        return {"critical_error": "init", "error": str(exception), "messages": []}

    def run_exception(self, job_details: Any, exception: Exception) -> dict[str, Any]:
        return {"critical_error": "run", "error": str(exception), "answer": ""}

    def eval_exception(self, job_details: Any, exception: Exception) -> dict[str, Any]:
        return {"critical_error": "eval", "error": str(exception)}

    def final_result(self, job_details: Any) -> dict[str, Any]:
        return {**job_details.run_results, "resolved": job_details.eval_results["resolved"]}


class Insistent(Asking):
    """Asks until it is refused."""

    async def run(self, job_details: Any, sid: str | None = None) -> dict[str, Any]:
        messages = [{"role": "user", "content": "go"}]
        while True:
            messages += [ask(job_details, messages), {"role": "user", "content": "on"}]


class Blaming(Asking):
    """Fails in `run`, for which the agent gets a reward."""

    async def run(self, job_details: Any, sid: str | None = None) -> dict[str, Any]:
        ask(job_details, [{"role": "user", "content": "go"}])
        raise ValueError("the patch does not apply")

    def run_exception(self, job_details: Any, exception: Exception) -> dict[str, Any]:
        return {"resolved": False, "error": str(exception)}


class Unprepared(Asking):
    """Fails in `init`."""

    async def init(self, job_details: Any, sid: str | None = None) -> tuple[Any, Any, Any]:
        raise OSError("no image")


class Blocking(Asking):
    """Blocks its thread in `run`, where it cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked, self.unblocked = threading.Event(), threading.Event()

    async def run(self, job_details: Any, sid: str | None = None) -> dict[str, Any]:
        answer = ask(job_details, [{"role": "user", "content": "go"}])
        self.blocked.set()
        self.unblocked.wait(30)
        return {"answer": answer["content"]}


class Slow(Blocking):
    """Blocks its thread in `init`, and then has a runtime."""

    async def init(self, job_details: Any, sid: str | None = None) -> tuple[Any, Any, Any]:
        self.thread = threading.current_thread()
        self.blocked.set()
        self.unblocked.wait(30)
        return await super().init(job_details, sid)


class Careless(Blocking):
    """Returns less from `init` than it must, and leaves a task that blocks its end."""

    async def init(self, job_details: Any, sid: str | None = None) -> Any:
        async def stubborn() -> None:
            try:
                await asyncio.sleep(30)
            finally:
                self.unblocked.wait(30)

        self.task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        return (await super().init(job_details, sid))[:2]


class Unfinished:
    """Has no methods but one."""

    name = "unfinished"

    async def init(self, job_details: Any, sid: str | None = None) -> None: ...


def ask(job_details: Any, messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the agent's next message."""
    config = job_details.llm_config
    request = urllib.request.Request(
        f"{config.base_url}/chat/completions",
        json.dumps({"model": config.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {config.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        message: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}

"""The process of an engine that is killed by every request that says `DEADLY`:
`python -m tests.runtime.mortal_engine`.
"""

import os
import signal
from pathlib import Path

from rollweave.engine import thread
from rollweave.engine.core import EngineCore
from rollweave.engine.request_state import load_tokenizer
from rollweave.runtime.entrypoints import engine
from rollweave.schema.serving import GenerateRequest

DEADLY = "kill this engine"


class MortalCore(EngineCore):
    def submit(self, request: GenerateRequest, *, report_s: float | None = None) -> None:
        text = load_tokenizer(Path(self.spec.model)).decode(list(request.tokens))
        if DEADLY in text:
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(request, report_s=report_s)


if __name__ == "__main__":
    thread.EngineCore = MortalCore  # type: ignore[misc]
    engine.main()
    os._exit(0)

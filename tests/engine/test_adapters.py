"""An engine adds published adapters to the weights that it began with, and uses nothing
else.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollweave.schema import serving as s
from rollweave.train import checkpoint
from rollweave.weights.adapters import A, B
from rollweave.weights.publication import Publisher
from tests.support.tiny_models import Outcome, build, drive, logprob_error, request, save, spec

torch.set_num_threads(1)

SCALE = 1.5
LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.gate_proj")
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    return build("qwen2")


@pytest.fixture(scope="module")
def path(base: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(base, tmp_path_factory.mktemp("base") / "model")


def adapters(base: torch.nn.Module, seed: int, *, rank: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        out, columns = base.get_submodule(layer).weight.shape  # type: ignore[union-attr,misc]
        tensors[layer + A] = 0.3 * torch.randn(rank, columns, generator=generator)
        tensors[layer + B] = 0.3 * torch.randn(out, rank, generator=generator)
    return tensors


def adapted(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return the base with these adapters, layer by layer."""
    model = build("qwen2")
    for layer in LAYERS:
        module = model.get_submodule(layer)
        a, b = tensors[layer + A], tensors[layer + B]
        module.register_forward_hook(
            lambda _, inputs, out, a=a, b=b: out + SCALE * (inputs[0] @ a.t()) @ b.t()
        )
    return model


def after(path: str, *commands: object) -> Outcome:
    """Return what an engine samples once it has executed these commands."""
    add = s.Add(request=request("r", PROMPT, seed=1, max_tokens=12))
    return drive(spec(path, lora_scale=SCALE), [], at={0: [*commands, add]})  # type: ignore[list-item]


def test_an_engine_computes_with_the_adapters(
    base: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    """Each version is added to the base and not to the version before, staged or
    not.
    """
    first, second = adapters(base, 1), adapters(base, 2)
    manifests = [
        publisher.publish(each, version=number, publication_id=number)
        for number, each in enumerate((first, second, first), 1)
    ]
    assert manifests[0].nbytes < 0.6 * sum(p.nbytes for p in base.parameters())
    outcome = after(path, *(s.Load(manifest=each) for each in manifests[:2]))
    result = outcome.results["r"]
    assert logprob_error(adapted(second), PROMPT, result) < 1e-4
    assert logprob_error(base, PROMPT, result) > 0.1
    once = after(path, s.Load(manifest=manifests[0])).results["r"]
    again = after(path, *(s.Load(manifest=each) for each in manifests)).results["r"]
    assert (again.tokens, again.logprobs) == (once.tokens, once.logprobs)


def test_staged_adapters_are_swapped_in(
    base: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    tensors = adapters(base, 3)
    manifest = publisher.publish(tensors, version=4, publication_id=4)
    outcome = drive(
        spec(path, lora_scale=SCALE),
        [request("old", PROMPT, seed=1, max_tokens=40)],
        at={2: [s.Stage(manifest=manifest)]},
        on={
            s.Staged: [
                s.Suspend(),
                s.Load(manifest=manifest),
                s.Resume(),
                s.Add(request=request("new", PROMPT, seed=1, max_tokens=12)),
            ]
        },
    )
    assert logprob_error(adapted(tensors), PROMPT, outcome.results["new"]) < 1e-4


def test_the_adapters_of_a_checkpoint_are_those_that_were_published(
    base: torch.nn.Module, path: str, publisher: Publisher, tmp_path: Path
) -> None:
    tensors = adapters(base, 5)
    saved = checkpoint.Checkpoint(
        step=7, model=tensors, optimizer={}, rng={"cpu": torch.get_rng_state()}
    )
    checkpoint.save(tmp_path / "c", saved, export_dtype=torch.float32)
    read = s.LoadCheckpoint(
        version=7, publication_id=1, directory=str(tmp_path / "c"), dtype="float32"
    )
    manifest = publisher.publish(tensors, version=7, publication_id=1)
    one, other = (after(path, each).results["r"] for each in (read, s.Load(manifest=manifest)))
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    assert logprob_error(adapted(tensors), PROMPT, one) < 1e-4


def test_what_is_no_complete_adapter_of_the_model_is_refused(
    base: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    """The former weights serve."""
    good, layer = adapters(base, 1), LAYERS[0]
    whole = dict(base.named_parameters())
    cases = {
        "tensors must be those of adapters, got": whole,
        f"got one of {layer}, without": {k: v for k, v in good.items() if k != layer + B},
        "got one of model.layers.9.q_proj, which the model lacks": good
        | {
            "model.layers.9.q_proj" + A: good[layer + A],
            "model.layers.9.q_proj" + B: good[layer + B],
        },
        f"the adapter of {layer} must have shapes": good | {layer + B: good[layer + B][1:]},
        f"the adapter of {layer} must be of floats": good | {layer + A: good[layer + A].int()},
        "tensors must be those of adapters, got []": {},
    }
    for number, (error, tensors) in enumerate(cases.items(), 2):
        manifests = [
            publisher.publish(each, version=version, publication_id=version)
            for version, each in ((1, good), (number, tensors))
        ]
        outcome = after(path, *(s.Load(manifest=each) for each in manifests))
        (failed,) = outcome.of(s.LoadFailed)
        assert error in failed.error
        assert logprob_error(adapted(good), PROMPT, outcome.results["r"]) < 1e-4


def test_an_engine_without_adapters_refuses_them(
    base: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    manifest = publisher.publish(adapters(base, 1), version=1, publication_id=1)
    outcome = drive(spec(path), [], at={0: [s.Load(manifest=manifest)]})
    (failed,) = outcome.of(s.LoadFailed)
    assert "tensors must be the model's parameters" in failed.error


def test_the_base_is_the_files_that_the_engine_began_with(
    base: torch.nn.Module, tmp_path: Path, publisher: Publisher
) -> None:
    """A checkpoint that is replaced while the engine runs changes nothing."""
    path = save(base, tmp_path / "replaced")
    tensors = adapters(base, 1)
    manifest = publisher.publish(tensors, version=1, publication_id=1)
    file = Path(path) / "model.safetensors"

    def replace() -> s.Load:
        others = {name: torch.zeros_like(each) for name, each in load_file(file).items()}
        save_file(others, file.with_suffix(".new"), metadata={"format": "pt"})
        file.with_suffix(".new").rename(file)
        return s.Load(manifest=manifest)

    add = s.Add(request=request("r", PROMPT, seed=1, max_tokens=12))
    outcome = drive(spec(path, lora_scale=SCALE), [], at={0: [replace, add]})
    assert logprob_error(adapted(tensors), PROMPT, outcome.results["r"]) < 1e-4

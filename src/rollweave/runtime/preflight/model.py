"""Check the model: its files, and whether it fits in memory and on disk.

These checks run before every run. They do not import torch, which takes seconds, for a
model from scratch on the CPU.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollweave.io.extras import how_to_install, missing_from
from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.template import DEFAULT, ChatTemplate, configured
from rollweave.runtime.checkpoints import EXPORT, Checkpoints, is_model
from rollweave.runtime.preflight.checks import Check, fail, failures, human_bytes, ok, refused, warn
from rollweave.runtime.preflight.environments import Domain
from rollweave.runtime.preflight.layout import (
    COMFORT,
    Layout,
    PlannedHost,
    check_fit,
    check_layout,
    check_pools,
    described,
    lay_out,
    this_machine,
    with_device,
)
from rollweave.runtime.preflight.memory import (
    checkpoint_bytes,
    parameters,
    scratch_shape,
    trained_parameters,
    trajectory_bytes,
)
from rollweave.runtime.preflight.prompts import examine_prompts, named, overlong_prompts, too_long
from rollweave.runtime.preflight.tokens import check_tokens, describe_template
from rollweave.schema.config.model import LoraConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, FieldError, HostError, TrainerError, WeightsError
from rollweave.schema.hosts import Resources
from rollweave.train.scratch import CHAT_TEMPLATE, build_tokenizer
from rollweave.weights.adapters import (
    adapter_sizes,
    check_adapter,
    linear_layers,
    targeted_layers,
)
from rollweave.weights.checkpoint import (
    ModelShape,
    gguf_of,
    read_any_shape,
    read_shape,
    read_sizes,
    weight_files,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Form of the names of models on the hub, which relative paths may have too."""

LEFT_OUT = "left out"
"""Name of the checks that say which prompts are left out."""

TEACHER_S = 15.0
"""Maximum seconds of each request that checks the teacher, which should serve before
the run.
"""

_WITHOUT_EXPERTS = fail(
    "algorithm.routing_replay",
    "must be false for a model without experts whose choice can be replayed, got true",
)


def examine_model(
    config: RunConfig, domains: Sequence[Domain], hosts: Mapping[str, Resources] | None = None
) -> tuple[list[Check], Layout | None]:
    """Check the model and its needs, and return the processes of the run, if they are
    known.

    `domains` are the task domains whose checks passed. With `hosts`, the run is planned
    for these, and only the model's shape must be known here.
    """
    complete = len(domains) == len(config.tasks)
    try:
        shape, checks = _model(config, domains, complete=complete, elsewhere=hosts is not None)
    except ConfigError as error:
        return [fail("model", str(error))], None
    except (ValueError, KeyError, TypeError) as error:
        return [fail("model", _text(error))], None
    if config.model.implementation == "transformers" or (
        shape is not None and shape.sizes is not None
    ):
        checks.append(_transformers(config, shape, elsewhere=hosts is not None))
    elif config.algorithm.routing_replay:
        checks.append(_WITHOUT_EXPERTS)
    if shape is None:
        return checks, None
    if config.lora is not None:
        checks.append(_adapters(config, config.lora, shape, elsewhere=hosts is not None))
        if failures(checks):
            return checks, None
    layout, layout_checks = _layout(config, shape, hosts)
    return [*checks, *layout_checks, *_disk(config, shape, elsewhere=hosts is not None)], layout


def without_overlong(
    config: RunConfig, domains: Sequence[Domain]
) -> tuple[RunConfig, list[Check], frozenset[str]]:
    """Return the configuration without the prompts that are too long, of domains that
    are to leave these out, a warning for each of these domains, and the names of
    domains whose remaining prompts were all measured and fit.

    A model or tokenizer that cannot be read changes nothing here: the check of the
    model says why.
    """
    checks, measured = list[Check](), set[str]()
    codec: ChatCodec | None = None
    for domain in (domain for domain in domains if domain.drops_overlong):
        try:
            codec = codec or _codec(config, domains)
            overlong = [place for place, _ in too_long(codec, domain)]
        except (ConfigError, ChatError, OSError, ValueError, KeyError, TypeError):
            break
        if overlong and len(overlong) == len(domain.prompts):
            continue  # with no prompt left, all are refused
        measured.add(domain.name)
        if not overlong:
            continue
        index = int(domain.name.rpartition(".")[2])
        tasks = list(config.tasks)
        options = tasks[index].options
        options = {**options, "left_out": [*options.get("left_out", ()), *overlong]}
        tasks[index] = tasks[index].model_copy(update={"options": options})
        config = config.model_copy(update={"tasks": tuple(tasks)})
        checks.append(
            warn(
                LEFT_OUT,
                f"{domain.name}: {len(overlong):,} of {len(domain.prompts):,} prompts are not "
                f"shorter than max_tokens ({domain.limits.max_tokens}), and are left out: "
                f"{named(overlong)}",
            )
        )
    return config, checks, frozenset(measured)


def check_joined(
    config: RunConfig, words: Sequence[str], hosts: Mapping[str, Resources]
) -> list[Check]:
    """Check that the processes of a run fit the hosts that have joined it.

    `words` are those of the tasks, of which a model from scratch has a vocabulary.
    """
    if config.model.scratch is not None:
        vocab = build_tokenizer(words).get_vocab_size()
        shape = scratch_shape(
            config.model.scratch, vocab, context=config.max_tokens, head_dim=config.head_dim
        )
    else:
        assert config.model.path is not None, "the configuration has one of path and scratch"
        if not Path(config.model.path, "config.json").exists():
            return []  # the engines report what their model lacks
        shape = _shape_of(config)
    planned = described(config, hosts)
    config = with_device(config, planned)
    return list(check_fit(config, lay_out(config, shape, planned)))


def _model(
    config: RunConfig, domains: Sequence[Domain], *, complete: bool, elsewhere: bool
) -> tuple[ModelShape | None, list[Check]]:
    """Return the model's shape, or None if it depends on tasks whose checks failed.

    Raises ConfigError, ValueError or KeyError.
    """
    if config.model.scratch is not None:
        if not complete:
            return None, [warn("model.scratch", "not checked: its vocabulary depends on the tasks")]
        words = [word for domain in domains for word in domain.words]
        codec = _codec(config, domains)
        tokenizer = codec.tokenizer
        for word in (word for domain in domains for word in domain.allowed):
            if len(tokenizer.encode(word).ids) != 1:
                raise ConfigError(
                    f"allowed_words must be among words, which are one token each, got {word!r}"
                )
        vocab = tokenizer.get_vocab_size()
        shape = scratch_shape(
            config.model.scratch, vocab, context=config.max_tokens, head_dim=config.head_dim
        )
        text = (
            f"{parameters(shape):,} random weights, {vocab} tokens, {len(set(words))} of them "
            "words of the tasks"
        )
        checks = [ok("model.scratch", text)]
        if not config.warmup.steps:
            checks.append(
                warn(
                    "warmup.steps",
                    "random weights without a warm-up hardly ever succeed, so nothing is learned",
                )
            )
        return shape, [
            *checks,
            *examine_prompts(codec, domains),
            *_teacher(config, codec, elsewhere=elsewhere),
        ]
    assert config.model.path is not None, "the configuration has one of path and scratch"
    directory = _model_directory(config.model.path)
    shape = _shape_of(config)
    checks = [
        ok("model.path", f"{directory}: {parameters(shape):,} weights, context {shape.context:,}")
    ]
    checks += _context(config, shape)
    if elsewhere and not (directory / "tokenizer.json").exists():
        text = "only config.json is here: weights, tokenizer and prompts are not checked"
        return shape, [*checks, warn("weights", text)]
    checks.append(_weights(directory, shape))
    codec = _codec(config, domains)
    checks += [*check_tokens(codec, shape), describe_template(codec)]
    for domain in domains:
        codec.single_token_ids(domain.allowed)
    return shape, [
        *checks,
        *examine_prompts(codec, domains),
        *_teacher(config, codec, elsewhere=elsewhere),
    ]


def _teacher(config: RunConfig, codec: ChatCodec, *, elsewhere: bool) -> Iterator[Check]:
    """Check that the teacher serves, and has the model's vocabulary. A run that is
    planned for other hosts asks no teacher.
    """
    if config.teacher is None or elsewhere:
        return
    # most runs need no HTTP client
    from rollweave.rollout.teacher import check_teacher

    url = config.teacher.url
    try:
        compared = check_teacher(config.teacher, codec.tokenizer, limit_s=TEACHER_S)
    except ConfigError as error:
        yield fail("teacher", str(error))
    else:
        yield ok("teacher", f"{url}: has the model's vocabulary, by {compared} of its tokens")


def _model_directory(path: str) -> Path:
    """Return the directory of a model in Hugging Face format, at `path`.

    Raises ConfigError, which names the model where `path` is a run or a checkpoint of
    one.
    """
    directory = Path(path)
    rule = f"model.path must be a folder with config.json, got {path}"
    if how := gguf_of(directory):
        raise ConfigError(f"{rule}; {how}")
    if not os.path.isdir(directory):
        hub = (
            f"; for a model of the hub: hf download {path} --local-dir DIR"
            if HUB_NAME.fullmatch(path) and not os.path.exists(directory.parent)
            else ""
        )
        raise ConfigError(f"model.path must be a checkpoint directory, got {path!r}{hub}")
    if is_model(directory):
        return directory
    if is_model(directory / EXPORT):
        raise ConfigError(f"{rule}, a checkpoint of a run: its model is {directory / EXPORT}")
    run = Checkpoints(directory / "checkpoints")
    if run.steps():
        model = run.model()
        its = f"its model is {model}" if model is not None else "none of its checkpoints has one"
        raise ConfigError(f"{rule}, a run: {its}")
    siblings = Checkpoints(directory.parent)
    if directory in map(siblings.path, siblings.steps()):
        models = ", ".join(str(siblings.export(step)) for step in siblings.exported()) or "none"
        raise ConfigError(
            f"{rule}, a checkpoint of a run, which has no model; those of the run that have one: "
            f"{models}"
        )
    raise ConfigError(rule)


def _shape_of(config: RunConfig) -> ModelShape:
    """Return the shape of `model.path`. Raises ConfigError for an architecture that the
    embedded engine, or the chosen implementation, does not compute.
    """
    assert config.model.path is not None, "the configuration has one of path and scratch"
    directory = Path(config.model.path)
    if config.model.implementation == "native":
        return read_shape(directory)
    if any(group.kind == "embedded" for group in config.engines):
        try:
            return read_shape(directory)
        except ConfigError as error:
            read_any_shape(directory)  # a damaged checkpoint is an error by itself
            raise ConfigError(f"the embedded engine cannot compute the model: {error}") from error
    return read_any_shape(directory)


def check_context(config: RunConfig) -> list[Check]:
    """Check that the model of `model.path` has room for the longest sequences. A model
    that cannot be read changes nothing here.
    """
    try:
        return list(_context(config, _shape_of(config)))
    except (ConfigError, ValueError, KeyError, TypeError):
        return []


def _context(config: RunConfig, shape: ModelShape) -> Iterator[Check]:
    longest = max(task.max_tokens for task in config.tasks)
    if longest > shape.context:
        yield fail(
            "tasks.max_tokens",
            f"must be at most the model's context ({shape.context}), got {longest}",
        )


def _adapters(config: RunConfig, lora: LoraConfig, shape: ModelShape, *, elsewhere: bool) -> Check:
    """Check that the model has the layers that are to have adapters, and that the
    adapter to start from is of this model.
    """
    try:
        sizes = adapter_sizes(shape, lora)
        if lora.path is not None and config.model.path is not None and not elsewhere:
            check_adapter(Path(lora.path), sizes, lora, base=Path(config.model.path))
    except FieldError as error:
        return refused(error)
    share = trained_parameters(config, shape) / parameters(shape)
    count = f"{trained_parameters(config, shape):,} weights in {len(sizes) // 2} layers"
    return ok("lora", f"{count}, {100 * share:.2g} % of the model")


def _layers_with_adapters(config: RunConfig, shape: ModelShape | None) -> list[str]:
    """Return these layers; none for targets that the model lacks, another problem."""
    if config.lora is None or shape is None:
        return []
    with contextlib.suppress(ConfigError):
        return targeted_layers(linear_layers(shape), config.lora.targets)
    return []


def _transformers(config: RunConfig, shape: ModelShape | None, *, elsewhere: bool) -> Check:
    """Check that the trainer can compute the model with transformers' code, and that
    its layers with adapters have the same names there and in the files.
    """
    name = "model.implementation"
    if missing_from("transformers"):
        return fail(name, f"transformers is not installed ({how_to_install('transformers')})")
    divided = config.trainer.tensor_parallel
    if config.model.path is None or elsewhere:
        if config.model.path is None and shape is not None:
            for what, count in (
                ("heads", shape.heads),
                ("pairs of keys and values", shape.kv_heads),
            ):
                if count % divided:
                    return fail(
                        "trainer.tensor_parallel",
                        f"must divide the {what} of the model from scratch ({count}), "
                        f"got {divided}",
                    )
        return ok(name, "transformers")
    # it takes seconds to import
    from rollweave.train.transformers_loading import examine

    try:
        stored, unused, experts = examine(Path(config.model.path), tensor_parallel=divided)
    except TrainerError as error:
        return fail(name, str(error))
    except FieldError as error:
        return refused(error)
    if config.algorithm.routing_replay and experts is None:
        return _WITHOUT_EXPERTS
    for layer in _layers_with_adapters(config, shape):
        view = stored.views.get(f"{layer}.weight")
        if view is None or view.parameter != f"{layer}.weight":
            return fail(
                "lora",
                "must be left out for a model whose layers have other names in its files, got "
                f"{layer}",
            )
    text = f"transformers: {len(stored.views):,} tensors"
    if unused:
        text += (
            f", trained on text alone: {len(unused):,} of them, such as {unused[0]}, are for "
            "other inputs, and are published and exported unchanged"
        )
    return ok(name, text)


def check_prompts(config: RunConfig, domains: Sequence[Domain]) -> list[Check]:
    """Check that every prompt of these domains leaves room for the agent."""
    if not domains:
        return []
    try:
        return failures(list(overlong_prompts(_codec(config, domains), domains)))
    except ConfigError as error:
        return [fail("model", str(error))]
    except (ChatError, OSError, ValueError, KeyError, TypeError) as error:
        return [fail("model", _text(error))]


def _codec(config: RunConfig, domains: Sequence[Domain]) -> ChatCodec:
    """Return the codec of the model. Raises ConfigError, OSError or ValueError."""
    if config.model.path is not None:
        return ChatCodec.from_directory(Path(config.model.path), config.model.template_arguments)
    words = [word for domain in domains for word in domain.words]
    template = ChatTemplate(CHAT_TEMPLATE, special={}, name="model.scratch")
    given = configured({DEFAULT: template}, config.model.template_arguments)
    return ChatCodec(build_tokenizer(words), given[DEFAULT])


def _weights(directory: Path, shape: ModelShape) -> Check:
    """Compare the files' headers with the shape, to detect a torn download or the
    weights of another model. Raises ConfigError.
    """
    try:
        shape.check(read_sizes(directory))
    except WeightsError as error:
        raise ConfigError(f"{directory}: {error}") from error
    size = sum(file.stat().st_size for file in weight_files(directory))
    return ok("weights", human_bytes(size))


def _layout(
    config: RunConfig, shape: ModelShape, hosts: Mapping[str, Resources] | None
) -> tuple[Layout | None, list[Check]]:
    """Lay the run out over `hosts` if they are given, or over this machine if the run
    has no cluster.
    """
    planned: list[PlannedHost] | None = None
    checks: list[Check] = []
    if hosts is not None:
        if config.cluster is not None:
            checks = list(check_pools(config, hosts))
        elif len(hosts) != 1:
            checks = [
                fail("--hosts", f"must describe one host without [cluster], got {len(hosts)}")
            ]
        if failures(checks):
            return None, checks
        planned = described(config, hosts)
    elif config.cluster is None:
        try:
            planned = this_machine(config)
        except (RuntimeError, AssertionError, HostError) as error:
            return None, [
                fail(
                    "model.device",
                    f"must be a CUDA device that works, got {config.model.device} ({error})",
                )
            ]
    layout = lay_out(config, shape, planned)
    return layout, [*checks, *check_layout(config, layout, planned)]


def _disk(config: RunConfig, shape: ModelShape, *, elsewhere: bool) -> Iterator[Check]:
    checkpoints, trajectories = checkpoint_bytes(config, shape), trajectory_bytes(config)
    text = (
        f"{human_bytes(checkpoints)} checkpoints + at most {human_bytes(trajectories)} trajectories"
    )
    if elsewhere:
        yield ok("disk", text)
        return
    parent = Path(config.run.dir)
    try:
        while not parent.exists():
            parent = parent.parent
        total, _, free = shutil.disk_usage(parent)
    except (OSError, ValueError):
        return  # no directory can have this name: `run.dir` is checked separately
    if not total:
        return  # /proc and the like hold no files at all; the check of `run.dir` reports that
    text += f" of {human_bytes(free)} free"
    if checkpoints > free:
        yield fail("disk", f"must hold the checkpoints: {text}")
    elif checkpoints + trajectories > COMFORT * free:
        yield warn("disk", f"{text}: tight")
    else:
        yield ok("disk", text)


def _text(error: Exception) -> str:
    what = (
        f"name {error}"
        if isinstance(error, KeyError)
        else f"have values of the right types: {error}"
    )
    return f"config.json must {what}"

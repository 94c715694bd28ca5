"""Check the model: its files, and whether it fits in memory and on disk.

These checks run before every run. They do not import torch, which takes seconds, for a
model from scratch on the CPU.
"""

import contextlib
import functools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rollweave.io.extras import how_to_install, missing_from
from rollweave.io.hub import WEIGHTS, folder, is_hub_name
from rollweave.record.store import STORED_TOKEN_BYTES
from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.template import DEFAULT, ChatTemplate, configured
from rollweave.runtime.checkpoints import checkpoint_bytes, model_directory
from rollweave.runtime.preflight.checks import (
    Check,
    fail,
    failures,
    ok,
    passing,
    refused,
    refusing,
    warn,
)
from rollweave.runtime.preflight.environments import Domain, with_options
from rollweave.runtime.preflight.layout import COMFORT, Layout, check_fit, check_layout, lay_out
from rollweave.runtime.preflight.prompts import (
    check_tokens,
    describe_template,
    examine_prompts,
    named,
    overlong_prompts,
    too_long,
)
from rollweave.runtime.preflight.site import Site, with_device
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import LoraConfig, TeacherConfig
from rollweave.schema.errors import ConfigError, FieldError, TrainerError, WeightsError
from rollweave.schema.hosts import Resources
from rollweave.schema.text import human_bytes
from rollweave.train.scratch import CHAT_TEMPLATE, build_tokenizer, scratch_shape
from rollweave.weights.adapters import adapter_sizes, check_adapter, linear_layers, targeted_layers
from rollweave.weights.checkpoint import (
    ModelShape,
    read_any_shape,
    read_shape,
    read_sizes,
    weight_files,
)
from rollweave.weights.needs import trained_parameters

LEFT_OUT = "left out"
"""Name of the checks that say which prompts are left out."""

TEACHER_S = 15.0
"""Maximum seconds of each request that checks the teacher, which should serve before
the run.
"""

UNREADABLE = (ConfigError, ChatError, OSError, ValueError, KeyError, TypeError)
"""The errors of reading a model or its tokenizer."""

WITHOUT_EXPERTS = FieldError(
    "algorithm.routing_replay",
    "be false for a model without experts whose choice can be replayed",
    "true",
)


def examine_model(
    config: RunConfig, domains: Sequence[Domain], site: Site
) -> tuple[list[Check], Layout | None]:
    """Check the model and its needs, and return the processes of the run, if they are
    known.

    `domains` are the task domains whose checks passed.
    """
    try:
        shape, checks = _model(config, domains, site)
    except UNREADABLE as error:
        return [_unreadable(error)], None
    if config.model.implementation == "transformers" or (
        shape is not None and shape.sizes is not None
    ):
        checks += _transformers(config, shape, site)
    elif config.algorithm.routing_replay:
        checks.append(refused(WITHOUT_EXPERTS))
    if shape is None:
        return checks, None
    if config.lora is not None:
        checks += _adapters(config, config.lora, shape, site)
        if failures(checks):
            return checks, None
    layout, layout_checks = _layout(config, shape, site)
    return [*checks, *layout_checks, *_disk(config, shape, site)], layout


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
        except UNREADABLE:
            break
        if overlong and len(overlong) == len(domain.prompts):
            continue  # with no prompt left, all are refused
        measured.add(domain.name)
        if not overlong:
            continue
        options = config.tasks[domain.index].options
        left_out = [*options.get("left_out", ()), *overlong]
        config = with_options(config, domain, {**options, "left_out": left_out})
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
    """Check that the hosts that have joined a run serve its pools, and that its
    processes fit them.

    `words` are those of the tasks, of which a model from scratch has a vocabulary.
    """
    site = Site(described=hosts)
    checks = list(site.check_pools(config))
    path = config.model.path
    if failures(checks) or (path is not None and not (folder(path) / "config.json").exists()):
        return checks  # the engines report what their model lacks
    shape, planned = _shape_of(config, words), site.hosts(config)
    config = with_device(config, planned)
    return [*checks, *check_fit(config, lay_out(config, shape, planned))]


def _model(
    config: RunConfig, domains: Sequence[Domain], site: Site
) -> tuple[ModelShape | None, list[Check]]:
    """Return the model's shape, or None if it depends on tasks whose checks failed.

    Raises `UNREADABLE`.
    """
    if config.model.scratch is not None and len(domains) < len(config.tasks):
        return None, [warn("model.scratch", "not checked: its vocabulary depends on the tasks")]
    directory = None if config.model.path is None else model_directory(config.model.path)
    words = [word for domain in domains for word in domain.words]
    shape = _shape_of(config, words)
    if directory is None:
        checks = list(_scratch(config, shape, len(set(words))))
    else:
        text = f"{directory}: {shape.parameters():,} weights, context {shape.context:,}"
        checks = [ok("model.path", text), *_context(config, shape)]
        if not site.is_here and not (directory / "tokenizer.json").exists():
            text = "only config.json is here: weights, tokenizer and prompts are not checked"
            return shape, [*checks, warn("weights", text)]
        checks.append(
            _weights(directory, shape)
            if has_weights(config)
            else warn("weights", "not checked: they are fetched when the run starts")
        )
    codec = _codec(config, domains)
    if directory is not None:
        checks += [*check_tokens(codec, shape), describe_template(codec)]
    for domain in domains:
        if directory is not None:
            codec.single_token_ids(domain.allowed)
            continue
        for word in domain.allowed:
            if len(codec.tokenizer.encode(word).ids) != 1:
                raise FieldError(
                    "allowed_words", "be among words, which are one token each", repr(word)
                )
    return shape, [*checks, *examine_prompts(codec, domains), *_teacher(config, codec, site)]


def _scratch(config: RunConfig, shape: ModelShape, words: int) -> Iterator[Check]:
    """Describe a model from scratch, with so many words of the tasks as tokens."""
    text = f"{shape.parameters():,} random weights, {shape.vocab} tokens, {words} of them words"
    yield ok("model.scratch", f"{text} of the tasks")
    if not config.warmup.steps:
        text = "random weights without a warm-up hardly ever succeed, so nothing is learned"
        yield warn("warmup.steps", text)


def _teacher(config: RunConfig, codec: ChatCodec, site: Site) -> Iterator[Check]:
    """Check that the teacher serves, and has the model's vocabulary."""
    if config.teacher is None or not site.is_here:
        return
    # most runs need no HTTP client
    from rollweave.rollout.teacher import check_teacher

    def compare(teacher: TeacherConfig) -> str:
        compared = check_teacher(teacher, codec.tokenizer, limit_s=TEACHER_S)
        return f"{teacher.url}: has the model's vocabulary, by {compared} of its tokens"

    yield passing("teacher", functools.partial(compare, config.teacher), ConfigError)


def _shape_of(config: RunConfig, words: Iterable[str] = ()) -> ModelShape:
    """Return the shape of the model; `words` are those of the tasks. Raises ConfigError
    for an architecture that the embedded engine, or the chosen implementation, does not
    compute.
    """
    if config.model.scratch is not None:
        vocab = build_tokenizer(words).get_vocab_size()
        return scratch_shape(
            config.model.scratch, vocab, context=config.max_tokens, head_dim=config.head_dim
        )
    assert config.model.path is not None, "the configuration has one of path and scratch"
    directory = folder(config.model.path)
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
    except UNREADABLE:
        return []


def _context(config: RunConfig, shape: ModelShape) -> Iterator[Check]:
    if config.max_tokens > shape.context:
        text = f"must be at most the model's context ({shape.context}), got {config.max_tokens}"
        yield fail("tasks.max_tokens", text)


@refusing
def _adapters(
    config: RunConfig, lora: LoraConfig, shape: ModelShape, site: Site
) -> Iterator[Check]:
    """Check that the model has the layers that are to have adapters, and that the
    adapter to start from is of this model.
    """
    sizes = adapter_sizes(shape, lora)
    if lora.path is not None and config.model.path is not None and site.is_here:
        check_adapter(Path(lora.path), sizes, lora, base=folder(config.model.path))
    trained = trained_parameters(config, shape)
    share = f"{100 * trained / shape.parameters():.2g} % of the model"
    yield ok("lora", f"{trained:,} weights in {len(sizes) // 2} layers, {share}")


def _layers_with_adapters(config: RunConfig, shape: ModelShape | None) -> list[str]:
    """Return these layers; none for targets that the model lacks, another problem."""
    if config.lora is None or shape is None:
        return []
    with contextlib.suppress(ConfigError):
        return targeted_layers(linear_layers(shape), config.lora.targets)
    return []


@refusing
def _transformers(config: RunConfig, shape: ModelShape | None, site: Site) -> Iterator[Check]:
    """Check that the trainer can compute the model with transformers' code, and that
    its layers with adapters have the same names there and in the files.
    """
    name, divisor = "model.implementation", config.trainer.tensor_parallel
    if missing_from("transformers"):
        yield fail(name, f"transformers is not installed ({how_to_install('transformers')})")
        return
    if config.model.path is None and shape is not None:
        sizes = {"heads": shape.heads, "pairs of keys and values": shape.kv_heads}
        for what, count in sizes.items():
            if count % divisor:
                rule = f"divide the {what} of the model from scratch ({count})"
                raise FieldError("trainer.tensor_parallel", rule, divisor)
    if config.model.path is None or not site.is_here or not has_weights(config):
        yield ok(name, "transformers")
        return
    # it takes seconds to import
    from rollweave.train.loading import examine

    try:
        stored, unused, experts = examine(folder(config.model.path), tensor_parallel=divisor)
    except TrainerError as error:
        yield fail(name, str(error))
        return
    if config.algorithm.routing_replay and experts is None:
        raise WITHOUT_EXPERTS
    for layer in _layers_with_adapters(config, shape):
        view = stored.views.get(f"{layer}.weight")
        if view is None or view.parameter != f"{layer}.weight":
            rule = "be left out for a model whose layers have other names in its files"
            raise FieldError("lora", rule, layer)
    text = f"transformers: {len(stored.views):,} tensors"
    if unused:
        text += (
            f", trained on text alone: {len(unused):,} of them, such as {unused[0]}, are for "
            "other inputs, and are published and exported unchanged"
        )
    yield ok(name, text)


def check_prompts(config: RunConfig, domains: Sequence[Domain]) -> list[Check]:
    """Check that every prompt of these domains leaves room for the agent."""
    try:
        return failures([*overlong_prompts(_codec(config, domains), domains)]) if domains else []
    except UNREADABLE as error:
        return [_unreadable(error)]


def _codec(config: RunConfig, domains: Sequence[Domain]) -> ChatCodec:
    """Return the codec of the model. Raises `UNREADABLE`."""
    if config.model.path is not None:
        return ChatCodec.from_directory(folder(config.model.path), config.model.template_arguments)
    words = [word for domain in domains for word in domain.words]
    template = ChatTemplate(CHAT_TEMPLATE, special={}, name="model.scratch")
    given = configured({DEFAULT: template}, config.model.template_arguments)
    return ChatCodec(build_tokenizer(words), given[DEFAULT])


def has_weights(config: RunConfig) -> bool:
    """Return whether the model's weights are here. Those of a model of the hub are
    fetched when a run starts, not in a dry run.
    """
    path = config.model.path
    return path is None or not is_hub_name(path) or any(folder(path).glob(WEIGHTS))


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


def _layout(config: RunConfig, shape: ModelShape, site: Site) -> tuple[Layout | None, list[Check]]:
    """Lay the run out over its hosts, as far as they are known."""
    checks = list(site.check_pools(config))
    try:
        hosts = site.hosts(config)
    except FieldError as error:
        checks.append(refused(error))
    if failures(checks):
        return None, checks
    layout = lay_out(config, shape, hosts)
    checks += check_layout(config, layout, hosts)
    if config.trainer.elastic and not failures(checks):
        most = _with_most_ranks(config)
        when = f", when there are {most.trainer.ranks} ranks"
        checks += [
            msgspec.structs.replace(check, detail=check.detail + when)
            for check in failures([*check_fit(most, lay_out(most, shape, hosts))])
        ]
    return layout, checks


def _with_most_ranks(config: RunConfig) -> RunConfig:
    """Return the run as it is when further ranks have all places of engines that they
    may have.
    """
    (engines,), trainer = config.engines, config.trainer
    count = engines.count - (trainer.most_ranks - trainer.first_ranks)
    return config.model_copy(
        update={
            "engines": (engines.model_copy(update={"count": count}),),
            "trainer": trainer.model_copy(update={"ranks": trainer.most_ranks}),
        }
    )


def _disk(config: RunConfig, shape: ModelShape, site: Site) -> Iterator[Check]:
    checkpoints = checkpoint_bytes(config, shape)
    # each trajectory that is trained on has its maximum length
    trajectories = config.run.steps * config.batch_tokens * STORED_TOKEN_BYTES
    text = (
        f"{human_bytes(checkpoints)} checkpoints + at most {human_bytes(trajectories)} trajectories"
    )
    if not site.is_here:
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


def _unreadable(error: Exception) -> Check:
    """Return the failure that one of `UNREADABLE` is."""
    if isinstance(error, ConfigError | ChatError | OSError):
        return fail("model", str(error))
    values = f"have values of the right types: {error}"
    what = f"name {error}" if isinstance(error, KeyError) else values
    return fail("model", f"config.json must {what}")

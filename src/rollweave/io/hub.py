"""Models of the Hugging Face hub by name: `organization/name`, with an optional
`@revision`.

A run fetches its model once, and from then on names it with the commit of that
download, so that a resumed run, and all processes of a run, read the same files from
the hub's cache without the network. The library `huggingface_hub` downloads, continues
partial downloads, and reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import os
import re
import sys
from pathlib import Path

from rollweave.schema.errors import FieldError

NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
"""Form of the names of models on the hub, which relative paths may have too."""

PINNED = re.compile(r"([A-Za-z0-9][\w.-]*)/([\w.-]+)@([0-9a-f]{40})")

WEIGHTS = "*.safetensors"

NEEDED = ("*.json", "*.jinja", "*.txt", "*.model")
"""What a model has beside its weights: sizes, tokenizer, chat template."""

NOT_NEEDED = ("*/*", "consolidated*", "params.json", "*.safetensors.index.fp32.json")
"""What repositories hold further: folders with other formats, and Mistral's own form
of the weights.
"""


def is_hub_name(path: str) -> bool:
    """Return whether `path` names a model of the hub: no file has this name, and no
    folder its first part.
    """
    match = NAME.fullmatch(path)
    return match is not None and not os.path.exists(path) and not Path(path).parent.exists()


def folder(path: str) -> Path:
    """Return the folder of a model: `path` itself, or the place in the hub's cache of a
    name that has its commit.
    """
    match = PINNED.fullmatch(path)
    if match is None or os.path.exists(path):
        return Path(path)
    # not needed by most runs
    from huggingface_hub import constants

    organization, name, commit = match.groups()
    return Path(
        constants.HF_HUB_CACHE, f"models--{organization}--{name}", "snapshots", commit
    ).absolute()


def fetched(path: str, *, weights: bool = True, field: str = "model.path") -> str:
    """Fetch a model of the hub, of which the cache may have parts, and return its name
    with the commit; any other path as it is. `weights=False` leaves out the weights.

    Raises FieldError for `field`.
    """
    match = NAME.fullmatch(path)
    if match is None or not is_hub_name(path):
        return path
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    repository, revision = match["repository"], match["revision"]
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*NEEDED, *([WEIGHTS] if weights else [])],
            ignore_patterns=list(NOT_NEEDED),
        )
    except errors.GatedRepoError:
        reason = "is gated: accept its terms there, and set HF_TOKEN to a token of that user"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.RepositoryNotFoundError:
        reason = "does not exist, or HF_TOKEN may not read it"
    except (OSError, ValueError) as error:
        reason = f"cannot be fetched: {_reason(error)}"
    else:
        return f"{repository}@{Path(snapshot).name}"
    raise FieldError(
        field,
        "be a folder or a model of the hub",
        f"{path!r}: there is no such folder, and {repository} of {constants.ENDPOINT} {reason}",
    )


def _reason(error: OSError | ValueError) -> str:
    """Return why a download failed, in one line."""
    from huggingface_hub import constants, errors

    cause = error.__cause__
    if constants.HF_HUB_OFFLINE or isinstance(cause, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have all of it"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or constants.HF_HUB_CACHE})"
    if isinstance(error, errors.LocalEntryNotFoundError) and cause is not None:
        error = OSError(str(cause) or type(cause).__name__)
    return str(error).split("\n")[0].strip()

"""Say how to install an optional dependency, depending on how Rollweave itself was installed."""

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import unquote, urlparse


def how_to_install(extra: str) -> str:
    """Return the pip command for optional dependency group `extra`: by path for a checkout, else by name from an index."""
    checkout = _checkout()
    return f"pip install 'rollweave[{extra}]'" if checkout is None else f"pip install -e '{checkout}[{extra}]'"


def _checkout() -> Path | None:
    """Return the checkout of an editable installation; None for any other installation."""
    try:
        record = importlib.metadata.distribution("rollweave").read_text("direct_url.json")
        origin = json.loads(record) if record else {}
        path = Path(unquote(urlparse(origin["url"]).path)) if origin.get("dir_info", {}).get("editable") else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return None
    if path is not None and path == Path.cwd():
        return Path(".")
    return path

"""What the command lines of the examples have in common, and how they keep their results."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def parser(text: str | None) -> argparse.ArgumentParser:
    """A command line with `--kvstore` and `--out`; the text is shown by `--help` as it stands."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_job = "KVSTORE_NUM_WORKERS" in os.environ
    found.add_argument("--kvstore", default="dist_sync" if is_job else "device", help="default: %(default)s")
    found.add_argument("--out", type=Path, help="write results as JSON into this file, for plots.py")
    return found


def save(path: Path | None, **results: Any) -> None:
    """Write results as JSON, if a file is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results) + "\n")


def read(folder: Path, name: str) -> Any:
    """What `save` has written into NAME.json."""
    return json.loads((folder / f"{name}.json").read_text())

"""The log of a run: to the terminal from rank 0, and to a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from kvtrainer.errors import ConfigurationError, file_error

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def make_logger(
    name: str,
    log_file: str | None,
    log_level: int | str = "INFO",
    file_mode: str = "a",
    rank: int = 0,
    every_rank: bool = False,
) -> logging.Logger:
    """A logger that writes to the terminal and to a file; a former one of that name is closed.

    Rank 0 writes what `log_level` lets through. The others write errors to the terminal, and have files
    of their own, with their rank in the name, if `every_rank`.

    Raises:
        ConfigurationError: the level is not known, or the file cannot be written.
    """
    level = log_level if isinstance(log_level, int) else logging.getLevelName(log_level.upper())
    if not isinstance(level, int):
        raise ConfigurationError(f"log_level is {log_level!r}; it must be one of logging's, such as 'INFO'")
    logger = logging.getLogger(name)
    close_logger(logger)
    logger.setLevel(level)
    logger.propagate = False
    terminal = logging.StreamHandler()
    terminal.setLevel(level if rank == 0 else max(level, logging.ERROR))
    handlers: list[logging.Handler] = [terminal]
    if log_file is not None and (rank == 0 or every_rank):
        base, ending = os.path.splitext(log_file)
        path = f"{base}_rank{rank}{ending}" if rank else log_file
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            # Appending lets it open again what others close, as torch.compile's own set-up of logging does.
            handlers.append(logging.FileHandler(path, file_mode, encoding="utf-8"))
        except (OSError, ValueError) as error:
            text = f"cannot write the log to {path!r}: {error}"
            raise file_error(ConfigurationError, text, error, path) from error
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT, "%Y/%m/%d %H:%M:%S"))
        logger.addHandler(handler)
    return logger


def close_logger(logger: logging.Logger, handlers: Iterable[logging.Handler] | None = None) -> None:
    """Close the files of a logger and take its handlers away: all of them, or these."""
    for handler in list(logger.handlers if handlers is None else handlers):
        logger.removeHandler(handler)
        handler.close()

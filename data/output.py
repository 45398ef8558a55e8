"""The output folder of a preparation: complete under its final name, or unfinished as OUTPUT.partial."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.files import sync
from data.journal import JOURNAL_NAME
from data.manifest import MANIFEST_NAME, Manifest
from data.source import TokenSource

# Options that old manifests lack, with the values that they had implicitly.
_IMPLICIT_OPTIONS: Mapping[str, Any] = {"encoding": "utf-8", "on_error": "stop", "newlines": "unify"}


def resolve_output(output: Path) -> Path:
    """Return the absolute path of OUTPUT, without links and `..`; the folder need not exist.

    Raises:
        DataError: If the folder cannot be replaced by another.
    """
    resolved = Path(os.path.realpath(output))
    if os.path.ismount(resolved):  # such as a container's volume
        raise DataError(f"--output {output}: this is a mount point and cannot be replaced; choose a folder in it")
    if resolved == Path.cwd():
        raise DataError(f"--output {output}: this is the current folder and cannot be replaced; choose another")
    return resolved


def partial_path(output: Path) -> Path:
    """Return `OUTPUT.partial`, the folder of an unfinished output."""
    return output.with_name(f"{output.name}.partial")


def is_up_to_date(output: Path, options: dict[str, Any], input_record: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output exists, is intact, and was made with these options from this input.

    Raises:
        DataError: If something else is there and may not be overwritten.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / "train" / MANIFEST_NAME).is_file():
        raise DataError(f"--output {output}: exists and was not made by data.prepare; choose another folder")
    try:
        manifest = Manifest.read(output / "train")
        for split in manifest.splits:
            TokenSource.open(output / split)
        difference = _first_difference(manifest, options, input_record)
    except DataError as error:
        difference = str(error)
    if difference is None:
        return True
    if overwrite:
        return False
    raise DataError(f"--output {output}: {difference}; choose another folder or pass --overwrite")


@contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """Lock `OUTPUT.partial` for this process; an error removes the folder, unless it has a journal to resume from.

    Raises:
        DataError: If another process is using the folder, or it cannot be created or written to.
    """
    folder = partial_path(output)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            # The lock belongs to the process and is released however the process ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is preparing this output") from None
        try:
            yield folder
        except BaseException as error:
            if (folder / JOURNAL_NAME).exists():
                print(f"progress is kept in {folder}; run the same command again to resume", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:  # for example when the disk is full
                raise DataError(f"{folder}: {error.strerror}") from None
            raise
    finally:
        os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove everything in a folder."""
    # The journal goes first, so that it never refers to files that are missing.
    (folder / JOURNAL_NAME).unlink(missing_ok=True)
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def publish(folder: Path, output: Path) -> None:
    """Rename the finished folder to its final name, replacing an older output."""
    (folder / JOURNAL_NAME).unlink(missing_ok=True)
    for child in folder.iterdir():
        if not child.is_dir():  # the tokenizer; each split has a copy by now
            child.unlink()
    sync(folder)
    replaced = folder.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.replace(replaced)
    folder.replace(output)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _first_difference(manifest: Manifest, options: dict[str, Any], input_record: dict[str, Any]) -> str | None:
    made_with = {**_IMPLICIT_OPTIONS, **manifest.options}
    for name in sorted(made_with.keys() | options.keys()):
        then, now = made_with.get(name), options.get(name)
        if then != now:
            return f"made with {name} = {then}, now {now}"
    if manifest.input != input_record:
        return "made from other input"
    return None

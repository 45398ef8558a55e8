"""Tests that fingerprints of files, which are stored in manifests and journals, never change."""

from pathlib import Path

import numpy as np
import pytest

from data.files import fingerprint_file, hash_file

WHOLE_BYTES = 16 << 20


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "99aa06d3014798d86001c324468d497f"),
        (1000, "fac4e9a77d6c8b108d3e88d833cd4a80"),
        (WHOLE_BYTES, "c74babf8e2b9cb4b6b9a97692162d650"),
        (WHOLE_BYTES + 1, "4f54821158eac7e8085b24a7eff187d5"),
        (WHOLE_BYTES + 12345, "1ad431d1852f1e617bdcf66f9cbbf365"),
    ],
)
def test_file_fingerprints_do_not_change_between_versions(tmp_path: Path, size_bytes: int, expected: str) -> None:
    content = (np.arange(size_bytes, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)
    content.tofile(tmp_path / "file")
    assert fingerprint_file(tmp_path / "file") == expected
    assert (hash_file(tmp_path / "file") == expected) == (size_bytes <= WHOLE_BYTES)

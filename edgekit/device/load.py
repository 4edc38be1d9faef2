"""Load a device profile by name or path, or detect `this` machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgekit.contracts.device import THIS, THIS_CPU, DeviceProfile
from edgekit.device.catalogue import PROFILE_ENDINGS, UnknownDevice, profile_files, read_profile


def load_profile(name_or_path: str | Path, folders: Sequence[Path] = ()) -> DeviceProfile:
    """Load a device profile by name or path; `this` is this machine, `this-cpu` the same without its GPU.

    `folders` are further folders with profiles. Raises `UnknownDevice`, with similar names, or `InvalidInput` for a
    file that is no profile.

        >>> profile = edgekit.load_profile("raspberry-pi-5-8gb")
        >>> print(profile.title, profile.budget().total_bytes)
    """
    text = str(name_or_path)
    if text in (THIS, THIS_CPU):
        from edgekit.device.detect import this_device

        return this_device(with_gpu=text == THIS)
    if isinstance(name_or_path, Path) or text.endswith(PROFILE_ENDINGS) or "/" in text or os.sep in text:
        return read_profile(Path(text))
    files = profile_files(folders)
    if text not in files:
        raise UnknownDevice(text, list(files))
    return read_profile(files[text])

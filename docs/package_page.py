"""The README and the addresses that the package index shows, and compiled operators; hatchling calls this for a wheel.

A release sets `PROJECT_URL` to the repository's address. The README's relative links then become absolute, to the pages
of this version, and the package names its pages. Without it the links stay as they are and nothing is named.

Where `EDGEKIT_WHEEL_KERNELS` names the library of the onnx target's operators, the wheel has it and is for its machine;
otherwise it is for every machine, and onnxruntime's own operators serve.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<path>[^)\s]+)\)")


def absolute_links(readme: str, pages: str, files: str) -> str:
    """The README with links below `pages`, and images below `files`."""

    def absolute(link: re.Match[str]) -> str:
        base = files if link["image"] else pages
        return f"{link['image']}[{link['text']}]({base}/{link['path']})"

    return RELATIVE_LINK.sub(absolute, readme)


class PackagePage(MetadataHookInterface):
    """Set `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = os.environ.get("PROJECT_URL", "").rstrip("/")
        metadata["urls"] = {}
        if address:
            if not re.fullmatch(r"https://[^\s/]+/\S+", address):
                raise ValueError(f"PROJECT_URL {address!r}: give the repository's address, https://HOST/OWNER/NAME")
            version = f"v{metadata['version']}"
            pages = f"{address}/blob/{version}"
            readme = absolute_links(readme, pages, files=f"{address}/raw/{version}")
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{pages}/docs/index.md",
                "Changelog": f"{pages}/CHANGELOG.md",
                "Security": f"{pages}/SECURITY.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


class CompiledOperators(BuildHookInterface[Any]):
    """Add the library that `EDGEKIT_WHEEL_KERNELS` names, and the tag of the machines that can load it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = os.environ.get("EDGEKIT_WHEEL_KERNELS")
        if library and version == "standard":
            from edgekit.apps.native.wheel import oldest_glibc

            build_data["force_include"][library] = "edgekit_onnx/kernels/build/libedgekit_kernels.so"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_{oldest_glibc(Path(library))}_{platform.machine()}"

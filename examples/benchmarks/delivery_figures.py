"""Measures what an installation fetches when it goes from one artifact to the next.

    python -m examples.benchmarks.delivery_figures OLD NEW [NEWER …]

Every artifact is published as a release of a site in a folder, and pulled into one installation.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from edgekit import delivery
from edgekit.artifact.artifact import read_manifest
from edgekit.delivery.site_index import manifest_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    print("| artifact | its bytes | fetched | with the manifest | share |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        site, app = Path(place) / "site", Path(place) / "app"
        for number, artifact in enumerate(parser.parse_args().artifacts, 1):
            delivery.publish([artifact], site, release=str(number))
            pulled = delivery.pull(site.as_uri(), app, allow=["file"])
            total = sum(fact.bytes for fact in read_manifest(artifact).manifest.files.values())
            fetched = pulled.fetched_bytes + (site / manifest_name(pulled.sha256)).stat().st_size
            print(f"| {artifact.name} | {total:,} | {pulled.fetched_bytes:,} | {fetched:,} | {fetched / total:.1%} |")


if __name__ == "__main__":
    main()

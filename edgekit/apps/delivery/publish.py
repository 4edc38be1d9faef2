"""`publish`: write artifacts as a static site that any file server or object store can host.

SITE/index.json               channels, releases and device rules; replaced last, atomically
SITE/files/ab/abcd…           manifests and files by their hash, so artifacts share equal files
SITE/signatures/HASH.sig      the signature of the index with that hash
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

from edgekit import Artifact, verify
from edgekit.apps.delivery.installation import alone
from edgekit.apps.delivery.signing import Signer, sign_bytes
from edgekit.apps.delivery.site_index import (
    INDEX,
    INDEX_VERSION,
    MAX_INDEX_BYTES,
    SIGNATURES,
    PublishedArtifact,
    Release,
    SiteIndex,
    check_release_name,
    file_name,
    manifest_name,
    signature_name,
)
from edgekit.common.files import copy_file, disk_full, file_sha256, free_bytes, sync_folder, write_file
from edgekit.common.parsing import read_bytes
from edgekit.common.progress import Progress
from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.contracts.manifest import CHUNKS_SINCE, MANIFEST, SIGNATURE
from edgekit.errors import InvalidInput, OutOfSpace, UnknownName


def publish(
    artifacts: Sequence[str | Path],
    site: str | Path,
    *,
    release: str,
    channel: str = "stable",
    devices: Sequence[str] = (),
    rollout: float | None = None,
    signer: Signer | None = None,
    progress: Progress = lambda done, total, what: None,
) -> SiteIndex:
    """Add artifacts to a release; a new name creates the newest release of the channel.

    A device gets the first artifact of the release that runs on it and fits. Without artifacts, only the roll-out of
    the release changes.

    Args:
        artifacts: folders that `export` wrote, best first.
        site: the folder of the site.
        release: a name such as `1.2`.
        channel: `stable`, `beta` or a name of your own.
        devices: patterns of profile names for these artifacts, such as `pixel-*`. Empty: every device that they fit.
        rollout: the share of installations that get the release, 0 to 1. None: unchanged; 1 for a new release.
        signer: signs the index.
        progress: called with the bytes done, their total and the current step.

    Raises `InvalidInput`, `UnknownName`, `DamagedArtifact` or `OutOfSpace`.
    """
    place = Path(site)
    check_release_name(release)
    if rollout is not None and not 0 <= rollout <= 1:
        raise InvalidInput(f"rollout: must be a share from 0 to 1, found {rollout}")
    if not artifacts and not place.exists():
        raise UnknownName("release", release, [])
    whole = [verify(path) for path in artifacts]
    with alone(place, progress):  # so that no other release is lost
        index = read_site(place, signer)
        releases = list(index.channels.get(channel, ()))
        known = next((each for each in releases if each.name == release), None)
        if known is None and not artifacts:
            raise UnknownName("release", release, [each.name for each in releases])
        entries = [_entry(each, tuple(devices)) for each in whole]
        _copy_files(place, whole, progress)
        if known is None:
            known = Release(name=release, number=index.releases + 1, artifacts=())
            index = index.model_copy(update={"releases": known.number})
            releases.append(known)
        new_hashes = {each.sha256 for each in entries}
        kept = tuple(each for each in known.artifacts if each.sha256 not in new_hashes)
        changed = known.model_copy(
            update={
                "artifacts": (*kept, *entries),
                "rollout": known.rollout if rollout is None else float(rollout),
            }
        )
        releases[releases.index(known)] = changed
        return _write_index(place, index, channel, releases, signer)


def withdraw(
    site: str | Path,
    *,
    release: str,
    channel: str = "stable",
    signer: Signer | None = None,
    progress: Progress = lambda done, total, what: None,
) -> SiteIndex:
    """Withdraw a release: installations that have it return to the newest release before it. Raises `UnknownName`."""
    path = Path(site)
    if not path.exists():
        raise UnknownName("channel", channel, [])
    with alone(path, progress):
        index = read_site(path, signer)
        releases = list(index.channel(channel))
        known = next((each for each in releases if each.name == release), None)
        if known is None:
            raise UnknownName("release", release, [each.name for each in releases])
        releases[releases.index(known)] = known.model_copy(update={"withdrawn": True})
        return _write_index(path, index, channel, releases, signer)


def read_site(site: Path, signer: Signer | None = None) -> SiteIndex:
    """Return the index of a site; an empty one for a new site.

    Raises `InvalidInput` if it is signed and `signer` is None, so that an unsigned index never replaces a signed one.
    """
    path = site / INDEX
    if not path.exists():
        return SiteIndex(sequence=0, channels={})
    data = read_bytes(path, MAX_INDEX_BYTES)
    if signer is None and (site / signature_name(hashlib.sha256(data).hexdigest())).exists():
        raise InvalidInput(
            f"{site}: its index is signed, and installations that check it would refuse one that is not; sign it"
            f" (--key), or remove {site / SIGNATURES} for good"
        )
    fix = "publish into a new folder"
    return read_sealed_json(data, SiteIndex, str(path), versions=INDEX_VERSION, sealed_since=1, fix=fix)[0]


def _entry(artifact: Artifact, devices: tuple[str, ...]) -> PublishedArtifact:
    signature, plan = artifact.folder / SIGNATURE, artifact.plan
    return PublishedArtifact(
        model=plan.model.name,
        recipe=plan.recipe.name,
        target=plan.target,
        backend=plan.backend,
        private_bytes=plan.estimate.private_bytes,
        total_bytes=plan.estimate.total_bytes,
        sha256=artifact.sha256,
        manifest_bytes=(artifact.folder / MANIFEST).stat().st_size,
        signature_sha256=file_sha256(signature) if signature.exists() else None,
        bytes=sum(fact.bytes for fact in artifact.manifest.files.values()),
        has_chunks=artifact.manifest.version >= CHUNKS_SINCE,
        devices=devices,
    )


def _copy_files(site: Path, artifacts: Sequence[Artifact], progress: Progress) -> None:
    """Copy the files that the site lacks, each under a temporary name until it is complete."""
    wanted: dict[str, Path] = {}
    for artifact in artifacts:
        place = site / manifest_name(artifact.sha256)
        if not place.exists():
            write_file(place, zlib.compress((artifact.folder / MANIFEST).read_bytes(), 9))
        wanted |= {fact.sha256: artifact.folder / name for name, fact in artifact.manifest.files.items()}
        signature = artifact.folder / SIGNATURE
        if signature.exists():
            wanted[file_sha256(signature)] = signature
    missing = {sha256: path for sha256, path in wanted.items() if not (site / file_name(sha256)).exists()}
    total, done = sum(path.stat().st_size for path in missing.values()), 0
    if missing and free_bytes(site) < total:
        raise OutOfSpace(str(site), total, free_bytes(site))
    for sha256, path in missing.items():
        progress(done, total, f"publishing: {path.name}")
        final = site / file_name(sha256)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{sha256}.part")
        with disk_full(partial, path.stat().st_size):
            copy_file(path, partial)
        partial.chmod(0o644)
        partial.rename(final)
        sync_folder(final.parent)
        done += final.stat().st_size
    progress(total, total, "publishing: done")


def _write_index(
    site: Path, index: SiteIndex, channel: str, releases: list[Release], signer: Signer | None
) -> SiteIndex:
    """Write the signature, then replace the index."""
    changed = SiteIndex.model_validate(
        {
            "sequence": index.sequence + 1,
            "releases": index.releases,
            "channels": {**index.channels, channel: tuple(releases)},
        }
    )
    data = to_sealed_json(changed)
    if len(data) > MAX_INDEX_BYTES:
        raise InvalidInput(f"{site / INDEX}: would have {len(data):,} bytes, {MAX_INDEX_BYTES:,} are allowed")
    if signer is not None:
        name = signature_name(hashlib.sha256(data).hexdigest())
        write_file(site / name, sign_bytes(INDEX, data, signer))
    write_file(site / INDEX, data)
    return changed

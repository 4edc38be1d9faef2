"""`pull`: update an installation to the newest release of a static site, fetching only missing chunks."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from edgekit import load_profile, open_artifact, read_artifact as read_manifest
from edgekit.apps.delivery import fetching, installation
from edgekit.apps.delivery.fetching import FetchLimits, PlacedChunk
from edgekit.apps.delivery.signing import check_signature
from edgekit.apps.delivery.site_index import (
    INDEX,
    INDEX_VERSION,
    MAX_INDEX_BYTES,
    PublishedArtifact,
    Release,
    SiteIndex,
    file_name,
    manifest_name,
    signature_name,
)
from edgekit.apps.delivery.transport import Site
from edgekit.common.files import free_bytes, write_file
from edgekit.common.progress import Progress
from edgekit.common.sealed_json import read_sealed_json
from edgekit.contracts.installed import (
    InstallationState,
    InstalledArtifact,
    folder_of,
    read_installed,
    write_installed,
)
from edgekit.contracts.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SIGNATURE_BYTES,
    SIGNATURE,
    Manifest,
    check_names,
)
from edgekit.errors import (
    DamagedArtifact,
    EdgekitError,
    InvalidInput,
    OutOfSpace,
    RollbackRefused,
    TransferFailed,
    UntrustedSignature,
)

_ATTEMPTS = 6
NO_PROGRESS: Progress = lambda done, total, what: None  # noqa: E731


class Pulled(NamedTuple):
    """The outcome of a pull."""

    folder: Path  # of the artifact in use
    sha256: str
    release: str
    is_new: bool  # False: no change
    fetched_bytes: int
    reused_bytes: int  # copied from artifacts on the disk
    skipped: str | None = None  # the release offered, which was rolled back here and is not taken again


def pull(
    url: str,
    out: str | Path,
    *,
    channel: str = "stable",
    device: str = "this",
    keys: str | Path | None = None,
    reuse: Sequence[str | Path] = (),
    allow: Sequence[str] = (),
    connections: int = 4,
    is_metered: Callable[[], bool] = lambda: False,
    proxy: str | None = None,
    timeout_s: float = 30.0,
    keep_bytes: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> Pulled:
    """Install the newest release of `channel` for `device` in the folder `out`; `edgekit.open(out)` opens it.

    An interrupted pull continues at the first incomplete chunk. After the first pull, the folder holds a working
    artifact at any time, and the former one until the next pull.

    Args:
        url: the site, as `edgekit publish` wrote it.
        out: the folder of the installation.
        channel: the channel to follow.
        device: a device profile by name or path, or `this`.
        keys: public keys or certificates of authorities; the index and the artifact must be signed with one of them.
        reuse: artifacts elsewhere on the disk whose chunks may be copied.
        allow: URL schemes besides https: `http` or `file`.
        connections: maximum number of connections.
        is_metered: called before and during the transfer; True ends it with `NetworkMetered`.
        proxy: `http://HOST:PORT`. None: from the environment (`HTTPS_PROXY`, `NO_PROXY`).
        timeout_s: seconds without data after which the server counts as stalled.
        keep_bytes: disk space for artifacts no longer in use. None: enough for the former one.
        progress: called with the bytes done, their total and the current step.

    Raises:
        TransferFailed: the site cannot be read, or sends less than 1,024 bytes/s; fetched chunks stay.
        NetworkMetered: `is_metered` returned True; fetched chunks stay.
        OutOfSpace: the disk is full; fetched chunks stay.
        DamagedArtifact: the site's bytes differ from its index and manifests.
        RollbackRefused: the site offers an older index or release than this installation has seen.
        UntrustedSignature: the signature is missing or by none of `keys`.
    """
    folder, site = Path(out), Site(url, allow=allow, proxy=proxy, timeout_s=timeout_s)
    limits = FetchLimits(_between(connections), is_metered)
    profile = load_profile(device)
    with installation.locked(folder, progress):
        installed = read_installed(folder) or installation.new_installation(site.url)
        index, index_sha256 = _read_index(site, keys, limits)
        _check_index_is_not_older(index, index_sha256, installed, site)
        newest = index.newest_for(channel, installed.installation)
        installed = installed.model_copy(
            update={"site": site.url, "sequence": index.sequence, "index_sha256": index_sha256}
        )
        release = _not_older_than_installed(newest, index, installed, channel)
        if release is None:
            write_installed(folder, installed)
            return _unchanged(folder, installed)
        chosen = release.artifact_for(profile)
        new = InstalledArtifact(sha256=chosen.sha256, release=release.name, number=release.number, channel=channel)
        if chosen.sha256 in installed.refused and installed.current is not None:
            write_installed(folder, installed)
            return _unchanged(folder, installed)._replace(skipped=release.name)
        if _is_whole(folder, new):
            if keys is not None:
                check_signature(folder_of(folder, new), keys)
            is_new = installed.current is None or installed.current.sha256 != new.sha256
            installed = installation.switch(folder, installed, new, None)
            return Pulled(folder_of(folder, new), new.sha256, new.release, is_new, 0, chosen.bytes)
        staging = installation.staging_of(folder, chosen.sha256)
        manifest = _staged_manifest(site, chosen, staging, limits)
        fetched, copied = _fill(site, folder, staging, manifest, list(map(Path, reuse)), limits, progress)
        _check_staged(staging, chosen, keys, progress)
        installed = installation.switch(folder, installed, new, staging)
        installation.remove_others(folder, installed, keep_bytes)
        return Pulled(folder_of(folder, new), new.sha256, new.release, True, fetched, copied)


def _between(connections: int) -> int:
    if not 1 <= connections <= fetching.MOST_CONNECTIONS:
        raise InvalidInput(f"connections: must be 1 to {fetching.MOST_CONNECTIONS}, found {connections}")
    return connections


def _read_index(site: Site, keys: str | Path | None, limits: FetchLimits) -> tuple[SiteIndex, str]:
    """Read the index and, with `keys`, check its signature."""
    data = _small_file(site, INDEX, MAX_INDEX_BYTES, limits)
    sha256 = hashlib.sha256(data).hexdigest()
    if keys is not None:
        signature = _small_file(site, signature_name(sha256), MAX_SIGNATURE_BYTES, limits, missing="is not signed")
        check_signature({INDEX: data}, keys, signature=signature, where=site.url + INDEX)
    fix = "pull again later, or tell its publisher"
    index, _ = read_sealed_json(data, SiteIndex, site.url + INDEX, versions=INDEX_VERSION, sealed_since=1, fix=fix)
    return index, sha256


def _small_file(site: Site, name: str, most: int, limits: FetchLimits, missing: str = "") -> bytes:
    """Read a small file, with the same retries as chunks."""
    with closing(site.connect()) as connection:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return connection.read_whole(name, most)
            except TransferFailed as error:
                if missing and not error.is_passing:
                    raise UntrustedSignature(f"{site.url}{INDEX}: {missing}; {error}") from error
                if not error.is_passing or attempt == _ATTEMPTS:
                    raise
                limits.sleep(error.wait_s or fetching.backoff_s(attempt))
    raise AssertionError("unreachable")


def _check_index_is_not_older(index: SiteIndex, sha256: str, installed: InstallationState, site: Site) -> None:
    if installed.site != site.url:
        return  # sequence numbers of different sites are unrelated
    if index.sequence < installed.sequence:
        raise RollbackRefused(
            f"{site.url}: its index is number {index.sequence}, and this installation has seen number"
            f" {installed.sequence}: this index is older than one seen before; tell its publisher"
        )
    if index.sequence == installed.sequence and sha256 != installed.index_sha256:
        raise RollbackRefused(
            f"{site.url}: its index number {index.sequence} differs from the one seen before under this number; tell"
            " its publisher"
        )


def _not_older_than_installed(
    release: Release, index: SiteIndex, installed: InstallationState, channel: str
) -> Release | None:
    """Return the release to install; None if the installed one is newer."""
    current = installed.current
    if current is None or current.channel != channel or release.number >= current.number:
        return release
    known = index.release_numbered(current.number)
    if known is None:
        raise RollbackRefused(
            f"{installed.site}: offers release {release.name}, older than {current.release}, which is in use and no"
            " longer in its index; its publisher can withdraw a release with `edgekit publish --withdraw`"
        )
    return release if known.withdrawn else None


def _unchanged(folder: Path, installed: InstallationState) -> Pulled:
    assert installed.current is not None
    place = folder_of(folder, installed.current)
    return Pulled(place, installed.current.sha256, installed.current.release, False, 0, 0)


def _is_whole(folder: Path, new: InstalledArtifact) -> bool:
    try:
        return open_artifact(folder_of(folder, new)).sha256 == new.sha256
    except EdgekitError:
        return False


def _staged_manifest(site: Site, chosen: PublishedArtifact, staging: Path, limits: FetchLimits) -> Manifest:
    """Fetch the manifest, and the signature if it exists, into the staging folder.

    What the index says is compared first with the disk and then with the manifest, before any chunk is looked at.
    """
    free, missing = free_bytes(staging), chosen.bytes - installation.allocated_bytes(staging)
    if free < missing:
        raise OutOfSpace(str(staging.parent), missing, free)
    staging.mkdir(parents=True, exist_ok=True)
    _keep(staging / MANIFEST, chosen.sha256, lambda: _manifest_bytes(site, chosen.sha256, limits))
    if chosen.signature_sha256 is not None:
        name = file_name(chosen.signature_sha256)
        _keep(
            staging / SIGNATURE,
            chosen.signature_sha256,
            lambda: _small_file(site, name, MAX_SIGNATURE_BYTES, limits),
        )
    else:
        (staging / SIGNATURE).unlink(missing_ok=True)
    manifest = installation.manifest_of((staging / MANIFEST).read_bytes(), f"{site.url}{file_name(chosen.sha256)}")
    check_names(staging, manifest)
    total = sum(fact.bytes for fact in manifest.files.values())
    if total != chosen.bytes:
        shutil.rmtree(staging)
        raise DamagedArtifact(
            f"{site.url}{file_name(chosen.sha256)}: lists files of {total:,} bytes, the index says {chosen.bytes:,};"
            " tell its publisher"
        )
    return manifest


def _manifest_bytes(site: Site, sha256: str, limits: FetchLimits) -> bytes:
    data, inflater = _small_file(site, manifest_name(sha256), MAX_MANIFEST_BYTES, limits), zlib.decompressobj()
    try:
        return inflater.decompress(data, MAX_MANIFEST_BYTES)
    except zlib.error as error:
        raise DamagedArtifact(f"{site.url}{manifest_name(sha256)}: cannot be decompressed: {error}") from error


def _keep(path: Path, sha256: str, read: Callable[[], bytes]) -> None:
    """Write a small file with this hash, unless it exists."""
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return
    data = read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedArtifact(f"{path.name}: its bytes are not those that the index lists ({sha256})")
    write_file(path, data)


def _fill(
    site: Site,
    folder: Path,
    staging: Path,
    manifest: Manifest,
    known: Sequence[Path],
    limits: FetchLimits,
    progress: Progress,
) -> tuple[int, int]:
    """Fill the staging folder with every chunk; return the bytes fetched and the bytes found on the disk.

    Other unfinished fetches are removed when their chunks were copied: failing ones do not fill the disk.
    """
    listed = {name.split("/")[0] for name in manifest.files} | {MANIFEST, SIGNATURE}
    for path in staging.iterdir():
        if path.name not in listed:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    fetching.prepare(staging, manifest)
    progress(0, 1, "looking for chunks on the disk")
    missing = [piece for piece in fetching.pieces_of(staging, manifest) if not fetching.is_whole(piece)]
    missing = fetching.reuse(missing, _known_pieces([folder, *known], staging, manifest), progress)
    installation.remove_unfinished(folder, staging)
    fetched = fetching.fetch(site, missing, limits, progress)
    total = sum(fact.bytes for fact in manifest.files.values())
    return fetched, total - sum(piece.bytes for piece in missing)


def _known_pieces(folders: Iterable[Path], staging: Path, wanted: Manifest) -> Iterable[PlacedChunk]:
    """Yield the chunks of all known artifacts on the disk, then the wanted chunks at the same offsets in them.

    The latter find equal bytes that another version of edgekit cut otherwise.
    """
    places = []
    for folder in folders:
        for path, manifest in installation.manifests_in(folder):
            if path != staging:
                yield from fetching.pieces_of(path, manifest)
                places.append(path)
        if (folder / MANIFEST).is_file():
            yield from fetching.pieces_of(folder, read_manifest(folder).manifest)
            places.append(folder)
    for place in places:
        yield from fetching.pieces_of(place, wanted)


def _check_staged(staging: Path, chosen: PublishedArtifact, keys: str | Path | None, progress: Progress) -> None:
    """Check the complete artifact, signature included, before it is used."""
    artifact = read_manifest(staging)
    assert artifact.sha256 == chosen.sha256
    artifact.check_hashes(lambda done, total, what: progress(done, total, f"checking: {what}"))
    if keys is not None:
        if chosen.signature_sha256 is None:
            raise UntrustedSignature(
                f"{chosen.model} {chosen.sha256[:12]}: is not signed; sign it and publish it again"
            )
        check_signature(staging, keys)

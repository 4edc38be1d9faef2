"""The index of a static site: channels, their releases, and the devices that each artifact is for. Pure data."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, StringConstraints

from edgekit import DeviceProfile
from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, FileBytes, Sha256, Share, Text, Version, Word
from edgekit.errors import InvalidInput, UnknownName, quote_short

INDEX = "index.json"
INDEX_VERSION = 1
MAX_INDEX_BYTES = 8 << 20
SIGNATURES = "signatures"

ReleaseName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\z")]


class PublishedArtifact(Frozen):
    """One artifact of a release, with its requirements and devices."""

    sha256: Sha256  # of the manifest, which lists the hash of every file
    manifest_bytes: FileBytes
    signature_sha256: Sha256 | None = None
    bytes: FileBytes  # of all its files
    has_chunks: bool = True
    model: Text
    recipe: Text
    target: Word
    backend: Word
    private_bytes: FileBytes  # predicted by the plan, as is `total_bytes`
    total_bytes: FileBytes
    devices: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()  # patterns of profile names; none: any that fits

    def refusal(self, profile: DeviceProfile) -> str | None:
        """Return the reason why this artifact is not for a device; None if it is."""
        if self.devices and not any(fnmatchcase(profile.name, pattern) for pattern in self.devices):
            return f"is for {', '.join(self.devices)}"
        if self.backend not in profile.targets.get(self.target, ()):
            return f"needs {self.target} {self.backend}, which it does not run"
        budget = profile.budget()
        if self.private_bytes > budget.private_bytes or self.total_bytes > budget.total_bytes:
            return f"needs more memory than its {budget.private_bytes:,} bytes for one app"
        return None


class Release(Frozen):
    """Artifacts of one release; a device gets the first that suits it."""

    name: ReleaseName
    number: Count  # increases with every release of the site
    artifacts: Annotated[tuple[PublishedArtifact, ...], Field(max_length=1000)]
    rollout: Share = 1.0  # of the installations
    withdrawn: bool = False

    def is_for(self, installation: str) -> bool:
        """Return True if the roll-out includes the installation; it then does so for every larger roll-out."""
        digest = hashlib.sha256(f"{installation} {self.number}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.rollout * 2**64

    def artifact_for(self, profile: DeviceProfile) -> PublishedArtifact:
        """Return the first suitable artifact. Raises `InvalidInput` with a reason per artifact if there is none."""
        reasons = []
        for artifact in self.artifacts:
            reason = artifact.refusal(profile)
            if reason is None:
                return artifact
            reasons.append(f"{artifact.model} {artifact.target} {artifact.backend} {artifact.recipe} {reason}")
        raise InvalidInput(f"release {self.name} has nothing for {profile.name}: {'; '.join(reasons) or 'it is empty'}")


class SiteIndex(Frozen):
    """The releases of a site. `sequence` increases with every change, which reveals an outdated index."""

    version: Version = INDEX_VERSION
    sequence: Count
    releases: Count = 0  # the newest release's number
    channels: Annotated[dict[Word, Annotated[tuple[Release, ...], Field(max_length=1000)]], Field(max_length=100)]

    def channel(self, name: str) -> tuple[Release, ...]:
        """Return the releases of a channel, oldest first."""
        if name not in self.channels:
            raise UnknownName("channel", name, self.channels)
        return self.channels[name]

    def newest_for(self, channel: str, installation: str) -> Release:
        """Return the newest release of a channel that is rolled out to an installation."""
        for release in reversed(self.channel(channel)):
            if not release.withdrawn and release.is_for(installation):
                return release
        raise InvalidInput(f"channel {channel}: no release is rolled out to this installation yet; try again later")

    def release_numbered(self, number: int) -> Release | None:
        """Return the release with this number in any channel."""
        releases = (release for channel in self.channels.values() for release in channel)
        return next((release for release in releases if release.number == number), None)


def file_name(sha256: str) -> str:
    """Return the path of a file in a site."""
    return f"files/{sha256[:2]}/{sha256}"


def manifest_name(sha256: str) -> str:
    """Return the path of a manifest in a site; it is compressed with zlib because every update fetches it."""
    return file_name(sha256) + ".z"


def signature_name(index_sha256: str) -> str:
    """Return the path of an index's signature in a site."""
    return f"{SIGNATURES}/{index_sha256}.sig"


def check_release_name(name: str) -> str:
    """Return `name`. Raises `InvalidInput` unless it can name a release."""
    try:
        Release(name=name, number=0, artifacts=())
    except ValueError as error:
        raise InvalidInput(
            f"release {quote_short(name)}: use letters, digits and . _ + -, at most 64, such as 1.2"
        ) from error
    return name

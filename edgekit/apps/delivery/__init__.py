"""Delivery: publish artifacts as a static site, and keep an app's installation up to date from it.

>>> from edgekit.apps import delivery
>>> pulled = delivery.pull("https://models.example.com/chat", "models/chat", keys="publisher.pub")
>>> runtime = edgekit.open("models/chat")
"""

from __future__ import annotations

from edgekit.apps.delivery.installation import prune, rollback
from edgekit.apps.delivery.publish import publish, withdraw
from edgekit.apps.delivery.pull import Pulled, pull
from edgekit.errors import NetworkMetered, RollbackRefused, TransferFailed, UntrustedSignature

__all__ = [
    "NetworkMetered",
    "Pulled",
    "RollbackRefused",
    "TransferFailed",
    "UntrustedSignature",
    "prune",
    "publish",
    "pull",
    "rollback",
    "withdraw",
]

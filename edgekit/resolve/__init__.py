"""From a model, devices and a wish to plans that explain themselves. Decides; converts and downloads nothing."""

from edgekit.resolve.choose import resolve
from edgekit.resolve.options import Subject
from edgekit.resolve.wish import Prefer, Wish

__all__ = ["Prefer", "Subject", "Wish", "resolve"]

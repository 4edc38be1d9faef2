"""Speculation: who proposes tokens, when, and how many. The loop accepts those that it would have chosen itself."""

from __future__ import annotations

from edgekit.runtime.drafting.pace import Pace, Step
from edgekit.runtime.drafting.request import Drafting, Playback, Request, Rest, Source, Unpaced

__all__ = ["Drafting", "Pace", "Playback", "Request", "Rest", "Source", "Step", "Unpaced"]

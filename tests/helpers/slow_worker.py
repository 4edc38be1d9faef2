"""A worker that greets and then never answers."""

from __future__ import annotations

import sys
import time

sys.stdin.buffer.read(4 + 2)
sys.stdout.buffer.write((2).to_bytes(4, "big") + b"{}")
sys.stdout.buffer.flush()
time.sleep(3600)

"""The built-in coordinator functions, under their documented path (spec: CoordinatorAdapters)."""

from __future__ import annotations

from flowkit.adapters.coordinator import CoordinatorAdapters, default_adapters
from flowkit.adapters.sensitive import SensitiveDetectorProto
from flowkit.errors import AdapterError

__all__ = ["AdapterError", "CoordinatorAdapters", "SensitiveDetectorProto", "default_adapters"]

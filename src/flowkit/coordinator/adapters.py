"""Public import path of the built-in coordinator functions (spec: CoordinatorAdapters)."""

from __future__ import annotations

from flowkit.activities.builtin_functions import CoordinatorAdapters, default_adapters
from flowkit.adapters.vars.sensitive import SensitiveDetectorProto
from flowkit.errors import AdapterError

__all__ = ["AdapterError", "CoordinatorAdapters", "SensitiveDetectorProto", "default_adapters"]

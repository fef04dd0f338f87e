"""Public import path of ArtifactsWriter. Handlers use an instance as `ctx.artifacts`."""

from flowkit.activities.context import ArtifactsWriter

__all__ = ["ArtifactsWriter"]

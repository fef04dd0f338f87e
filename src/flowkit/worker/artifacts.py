"""The documented home of ArtifactsWriter; a handler finds one in `ctx.artifacts`."""

from flowkit.activities.context import ArtifactsWriter

__all__ = ["ArtifactsWriter"]

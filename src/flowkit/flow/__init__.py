"""Graphs as programs write them: `Flow`, its nodes, and values by expression. Pure: no Temporal, no I/O."""

from flowkit.flow.builder import Flow
from flowkit.flow.nodes import FlowNode, Ref
from flowkit.flow.values import Cel, cel

__all__ = ["Cel", "Flow", "FlowNode", "Ref", "cel"]

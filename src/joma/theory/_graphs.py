"""Graphs from networkx, checked: a rooted tree, or a directed graph without cycles. networkx is imported when used."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx


def _named(cycle: list[Any]) -> str:
    return " → ".join(str(edge[0]) for edge in cycle) + f" → {cycle[-1][1]}"


def acyclic_order(graph: nx.DiGraph) -> list[list[Hashable]]:
    """The nodes in generations, each after all its predecessors; a ValueError that names a cycle if there is one."""
    import networkx as nx

    try:
        return [list(generation) for generation in nx.topological_generations(graph)]
    except nx.NetworkXUnfeasible:
        raise ValueError(f"the graph has a cycle: {_named(nx.find_cycle(graph))}") from None


def rooted_tree(
    graph: nx.Graph, root: Hashable | None, rho: float
) -> tuple[list[Hashable], list[int], list[float]]:
    """Nodes below the root layer by layer, the position of each one's parent (−1: the root), ρ of the other edges."""
    import networkx as nx

    if graph.number_of_nodes() == 0:
        raise ValueError("the tree is empty: the graph has no nodes")
    with contextlib.suppress(nx.NetworkXNoCycle):
        raise ValueError(f"the graph has a cycle: {_named(nx.find_cycle(graph))}; a tree has none")
    if graph.is_directed():
        two = [node for node in graph if graph.in_degree(node) > 1]
        if two:
            parents = ", ".join(str(node) for node in graph.predecessors(two[0]))
            raise ValueError(
                f"node {two[0]!r} has {graph.in_degree(two[0])} parents ({parents}); in a tree it has one"
            )
        roots = [node for node in graph if graph.in_degree(node) == 0]
        if root is None:
            root = roots[0]
    if root is None:
        raise ValueError("an undirected tree needs root=, the node that is the class")
    if root not in graph:
        raise ValueError(f"root {root!r} is not a node of the graph")
    names: list[Hashable] = []
    parent: list[int] = []
    edges: list[float] = []
    position: dict[Hashable, int] = {root: -1}
    for a, b in nx.bfs_edges(graph, root):
        position[b] = len(names)
        names.append(b)
        parent.append(position[a])
        if a != root:
            edges.append(float(graph.edges[a, b].get("rho", rho)))
    missing = [node for node in graph if node not in position]
    if missing:
        raise ValueError(
            f"the tree is disconnected: {len(missing)} nodes cannot be reached from {root!r}, {missing[0]!r} among them"
        )
    return names, parent, edges

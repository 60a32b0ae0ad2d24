"""Replicas of a server as Ray actors on the nodes of a cluster.

replica    one replica: an actor that holds the same `Replica` as a process of `rayrec serve`
placing    room for the replicas, spread over the nodes
replicas   what happens to them, and how they end
serving    joins the cluster and holds the replicas there

A predictor knows nothing of Ray, and nothing below this package does.
"""

from __future__ import annotations

from rayrec.serve.cluster.serving import serve_on_cluster, served_on_cluster

__all__ = ["serve_on_cluster", "served_on_cluster"]

"""The server of `rayrec serve` on the nodes of a Ray cluster.

placing    room for the replicas, spread over the nodes
hosts      what happens to the nodes' servers, and how they end
serving    joins the cluster and holds the servers there

A predictor knows nothing of Ray, and nothing below this package does.
"""

from __future__ import annotations

from rayrec.serve.cluster.serving import serve_on_cluster, served_on_cluster

__all__ = ["serve_on_cluster", "served_on_cluster"]

"""The server of `rayrec serve` on the nodes of a Ray cluster.

A predictor knows nothing of Ray, and nothing below this package does.
"""

from __future__ import annotations

from rayrec.serve.cluster.serving import serve_on_cluster, served_on_cluster

__all__ = ["serve_on_cluster", "served_on_cluster"]

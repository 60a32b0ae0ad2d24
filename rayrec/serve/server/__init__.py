"""The server: replicas of a predictor for gRPC and HTTP, and the process that watches them."""

"""The server: replicas of a predictor that answer gRPC and HTTP, and the process that watches them.

untrusted      bytes from anybody as columns that are safe to read
scoring        the queue of a replica, and the thread that scores whatever waits in it
faults         what an error is called in gRPC, in HTTP and among the metrics
grpc_service   bytes in, bytes out
http_service   JSON for people, and health, readiness and metrics
replica        one process
supervisor     all of them: starts, watches, drains
"""

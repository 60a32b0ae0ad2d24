"""The server: replicas of a predictor that answer gRPC and HTTP, and the process that watches them.

settings       where it listens, and how much it takes
served         what it needs of a predictor
untrusted      bytes from anybody as columns that are safe to read
scoring        the queue of a replica, and the thread that scores whatever waits in it
faults         what an error is called in gRPC, in HTTP and among the metrics
metrics        what is counted for Prometheus
grpc_service   bytes in, bytes out
body           bodies of HTTP, as JSON or as Arrow streams
http_service   JSON for people, and health, readiness and metrics
replica        one process
held           the ports and the folder of numbers that the replicas share
supervisor     all of them: starts, watches, drains
leading        how the parent of replicas brings them from version to version of a chain
following      how a replica changes over
needed         whether the packages of the extra `serve` are there
"""

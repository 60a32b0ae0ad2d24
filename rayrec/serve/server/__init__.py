"""The server: replicas of a predictor that answer gRPC and HTTP, and the process that watches them.

settings       where it listens, and how much it takes
served         the model of a server, and its predictor
untrusted      bytes from anybody as columns that are safe to read
scoring_queue  the queue of a replica, and the thread that scores whatever waits in it
faults         what an error is called in gRPC, in HTTP and among the metrics
metrics        what is counted for Prometheus
grpc_service   bytes in, bytes out; and whether a replica is to be given requests
body           bodies as JSON, as Arrow streams or as protobuf
http_service   JSON for people, and health, readiness and metrics
answering      a request from its bytes to those of the answer, for both
replica        one process
held           the ports and the folder of numbers that the replicas share
pulse          how the supervisor sees that a replica hangs
process_slot   the place of one replica, whichever process it is
forked         what a process does that was forked to be a replica
telling        lines of a server for its user
supervisor     all of them: starts, watches, drains
hosted         the same in a process of its own, for a program that may not be forked
leading        how a parent and its replicas go from version to version of a chain
needed         whether the packages of the extra `serve` are there
"""

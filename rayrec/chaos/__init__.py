"""`rayrec chaos`: the user's own job in a private cluster, under faults that follow from a seed."""

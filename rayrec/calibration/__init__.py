"""Calibration of the planner: ranks measure their cluster, and fit the cost model to it."""

"""Planning a run: how many generators and reward daemons, which staleness bound, and what to expect."""

from learner.planning.fleet import Plan, Prediction, Workload, predict, recommend
from learner.planning.measured import measure

__all__ = ["Plan", "Prediction", "Workload", "measure", "predict", "recommend"]

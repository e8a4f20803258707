"""The whole configuration: one YAML file describes the run for all roles."""

from pydantic import Field

from protocol.config.base import Section
from protocol.config.learner import AlarmSection, AlgorithmSection, LearnerSection, SftSection, TrainerSection
from protocol.config.run import DataSection, EvaluationSection, ModelSection, RunSection, SamplingSection, Stage
from protocol.config.services import (
    CoordinatorSection,
    DeploySection,
    GeneratorsSection,
    RewarddSection,
    SinksSection,
    TransportSection,
    WeightsSection,
)


class Config(Section):
    """Everything. Importable without torch; cross-role rules are in `protocol.config.checks`."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    stages: list[Stage] = Field(default_factory=list, description="Changes of lengths and sampling during the run.")
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    alarms: AlarmSection = AlarmSection()
    evaluation: EvaluationSection = EvaluationSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    generators: GeneratorsSection = GeneratorsSection()
    rewardd: RewarddSection = RewarddSection()
    weights: WeightsSection = WeightsSection()
    sinks: SinksSection = SinksSection()
    transport: TransportSection = TransportSection()
    deploy: DeploySection = DeploySection()

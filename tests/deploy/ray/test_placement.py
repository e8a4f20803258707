"""What roles ask of a Ray cluster."""

from typing import Any

import pytest

from deploy.ray.placement import Cluster, check_cluster, resources_of
from protocol.config import Config
from protocol.errors import UserError

CPUS = Cluster(home="10.0.0.1", num_machines=1, cpus=32, gpus=0)
GPUS = Cluster(home="10.0.0.1", num_machines=1, cpus=64, gpus=8)


def make_config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "/m"}, "data": {"train_files": []}} | sections)


def test_state_stays_where_the_run_folder_is_and_generators_go_anywhere() -> None:
    config = make_config(generators={"tensor_parallel_size": 2}, trainer={"num_ranks": 4})
    home = {"node:10.0.0.1": 0.001}
    assert resources_of(config, "coordinator", cluster=GPUS) == {"CPU": 1.0, **home}
    assert resources_of(config, "trainer", cluster=GPUS) == {"CPU": 4.0, "GPU": 4.0, **home}
    assert resources_of(config, "generator", cluster=GPUS) == {"CPU": 2.0, "GPU": 2.0}
    assert resources_of(config, "generator", cluster=CPUS) == {"CPU": 1.0}


def test_rewardd_asks_for_its_workers_and_a_scripted_generator_for_no_gpu() -> None:
    config = make_config(
        rewardd={"math": {"num_workers": 3}, "code": {"num_workers": 5}}, generators={"backend": "scripted"}
    )
    assert resources_of(config, "rewardd", cluster=CPUS) == {"CPU": 8.0}
    assert resources_of(config, "generator", cluster=GPUS) == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("sections", "cluster", "message"),
    [
        ({"generators": {"num": 9}}, GPUS, r"want 10 GPUs and the Ray cluster has 8"),
        ({"rewardd": {"code": {"num_workers": 40}}}, CPUS, r"CPUs and the Ray cluster has 32"),
        (
            {},
            Cluster(home="10.0.0.1", num_machines=2, cpus=64, gpus=0),
            r"reaches only one machine .* tcp://10\.0\.0\.1",
        ),
        ({"trainer": {"num_nodes": 2}}, GPUS, r"trainer\.num_nodes above 1"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_change(
    sections: dict[str, Any], cluster: Cluster, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_cluster(make_config(**sections), cluster=cluster)


def test_what_fits_passes() -> None:
    check_cluster(make_config(), cluster=CPUS)

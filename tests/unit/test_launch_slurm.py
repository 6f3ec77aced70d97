"""How the launcher reads a SLURM environment."""

from __future__ import annotations

import pytest

from zeroshard.core.launcher_variables import expand_nodelist, read_slurm
from zeroshard.errors import LaunchError
from zeroshard.launch.launch_plan import ExecAsRank, RunHere, RunSrun, plan_launch
from zeroshard.launch.options import LaunchRequest

BATCH = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def decision(env, *, has_srun=True, **options):
    request = LaunchRequest("train.py", ("--lr", "1"), **options)
    return plan_launch(request, env, this_host=("n1",), has_srun=has_srun)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ("login",)),
        ("n[01-03,07],gpu5", ("n01", "n02", "n03", "n07", "gpu5")),
        ("r[1-2]n[08-09]", ("r1n08", "r1n09", "r2n08", "r2n09")),
        ("n[9-11]-ib", ("n9-ib", "n10-ib", "n11-ib")),
        ("", ()),
    ],
)
def test_node_lists_expand_in_order(text, names):
    assert expand_nodelist(text) == names


def test_unreadable_node_list_is_named():
    with pytest.raises(
        LaunchError, match=r"^SLURM node list 'n\[a\]': cannot read 'a' in 'n\[a\]'"
    ):
        expand_nodelist("n[a]")


def test_no_job_without_a_job_id():
    assert read_slurm({"SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(("step", "inside"), [("0", True), ("4294967291", False), ("", False)])
def test_the_batch_step_is_not_a_step_of_the_user(step, inside):
    job = read_slurm({**BATCH, "SLURM_STEP_ID": step})
    assert job is not None
    assert job.in_step is inside


def test_one_task_per_rank_becomes_that_rank():
    chosen = decision(STEP)
    assert isinstance(chosen, ExecAsRank)
    assert chosen.env == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "23456",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
    }


def test_uneven_tasks_per_node_are_refused():
    with pytest.raises(LaunchError, match=r"^SLURM started 5 tasks on 2 nodes, so nodes have"):
        decision({**STEP, "SLURM_NTASKS": "5"})


def test_nproc_contradicts_one_task_per_rank():
    with pytest.raises(LaunchError, match="each becomes one rank, so --nproc 2 cannot be used"):
        decision(STEP, nproc=2)


def test_one_task_per_node_is_the_launcher_of_its_node():
    step = {**STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert decision(step, nproc=8) == RunHere(8, 2, 1, "n1", 23456, None)


def test_a_job_of_several_nodes_starts_one_launcher_per_node():
    chosen = decision({**BATCH, "SLURM_NTASKS_PER_NODE": "8"}, module=True)
    assert isinstance(chosen, RunSrun)
    head, tail = chosen.command[:5], chosen.command[6:]
    assert head == (
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
    )
    assert tail == (
        *("-m", "zeroshard.launch", "--master_addr", "n1", "--master_port", "23456"),
        *("--nproc", "8", "--module", "--", "train.py", "--lr", "1"),
    )


def test_fewer_nodes_than_the_job_has_are_named_to_srun():
    chosen = decision(BATCH, include="n2")
    assert isinstance(chosen, RunSrun)
    assert chosen.command[1:5] == (
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--nodelist=n2",
    )


def test_several_nodes_without_srun_are_refused():
    with pytest.raises(LaunchError, match=r"^the SLURM job has 2 nodes, but there is no srun on"):
        decision(BATCH, has_srun=False)


def test_a_job_on_one_node_runs_here():
    one = {**BATCH, "SLURM_JOB_NODELIST": "n1"}
    assert decision(one, nproc=4) == RunHere(4, 1, 0, None, None, None)


def test_a_hostfile_outranks_slurm(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    assert decision(BATCH, hostfile=str(hostfile)) == RunHere(2, 1, 0, None, None, None)

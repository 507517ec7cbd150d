"""A training that is stopped, cancelled, preempted, or loses a node: saved, queued again, gone on with, said truly."""

from __future__ import annotations

TWO = ("-N2", "--gpus-per-node=1")


def assert_no_step_lost_or_repeated(job, last):
    assert [step for _, step, _ in job.steps()] == list(range(1, last + 1))


def test_the_time_limit_stops_saves_queues_again_and_goes_on(training):
    """--time=1: Slurm's own signal, 50 s before the end, as often as it takes."""
    job = training(*TWO, "--time=1", "--signal=B:USR1@50", STEPS="60", STEP_SECONDS="0.4")
    assert job.wait("COMPLETED", "FAILED", "TIMEOUT", timeout=180) == "COMPLETED", job.log
    assert job.exit_code == 0
    assert_no_step_lost_or_repeated(job, 60)
    attempts = sorted({attempt for attempt, _, _ in job.steps()})
    assert len(attempts) > 1
    assert attempts == list(range(len(attempts)))
    assert int(job.show()["Restarts"]) == attempts[-1]
    for attempt in attempts:
        text = (job.train.parent / f"logs/train-{job.id}-{attempt + 1}.log").read_text()
        begins = [int(line.split()[-1]) for line in text.splitlines() if line.startswith("rank 0")]
        assert begins == [next(step for a, step, _ in job.steps() if a == attempt) - 1]
    assert not (job.train / "stop-requested").exists()


def test_restarts_are_counted_and_end(training):
    job = training(*TWO, STEPS="1000", WHERRY_MAX_RESTARTS="1")
    for attempt in (0, 1):
        job.until(lambda n=attempt: job.steps() and job.steps()[-1][0] == n, 60, f"attempt {attempt}")
        job.cluster.user("scancel", "--batch", "--signal=USR1", job.id)
    assert job.wait("FAILED", "COMPLETED", timeout=60) == "FAILED"
    assert job.exit_code == 75
    assert "WHERRY_MAX_RESTARTS=1" in job.log
    assert_no_step_lost_or_repeated(job, job.steps()[-1][1])


def test_a_preempted_job_saves_waits_and_goes_on(training):
    """By a job of a partition with priority, with a grace period of 30 s."""
    job = training("-N3", "--gpus-per-node=1", STEPS="40", STEP_SECONDS="0.3")
    job.wait_for_step(3)
    urgent = job.cluster.sbatch("--partition=urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    assert urgent.wait(timeout=120) == "COMPLETED"
    assert job.wait("COMPLETED", "FAILED", "PREEMPTED", timeout=120) == "COMPLETED", job.log
    assert_no_step_lost_or_repeated(job, 40)
    assert int(job.show()["Restarts"]) >= 1


def test_sigterm_saves_and_queues_again(training):
    job = training(*TWO, STEPS="40", STEP_SECONDS="0.3")
    job.wait_for_step(3)
    job.cluster.user("scancel", "--batch", "--signal=TERM", job.id)
    assert job.wait("COMPLETED", "FAILED", timeout=90) == "COMPLETED", job.log
    assert_no_step_lost_or_repeated(job, 40)
    assert int(job.show()["Restarts"]) == 1


def test_a_stop_that_the_user_asked_for_stays_stopped(training):
    job = training(*TWO, STEPS="1000")
    job.wait_for_step(3)
    (job.train / "stop-requested").touch()
    assert job.wait(timeout=60) == "FAILED"
    assert job.exit_code == 75
    assert_no_step_lost_or_repeated(job, int((job.train / "checkpoint").read_text()))
    assert int(job.show()["Restarts"]) == 0


def test_scancel_saves_and_stays_cancelled(training):
    job = training(*TWO, STEPS="1000")
    job.wait_for_step(3)
    job.cancel()
    assert job.wait(timeout=60) == "CANCELLED"
    assert job.wait(timeout=10) == "CANCELLED"
    assert_no_step_lost_or_repeated(job, int((job.train / "checkpoint").read_text()))
    assert "SIGTERM" in job.log


def test_a_requeue_from_outside_goes_on(training):
    job = training(*TWO, STEPS="40", STEP_SECONDS="0.3")
    job.wait_for_step(3)
    assert job.cluster.user("scontrol", "requeue", job.id)[0] == 0
    assert job.wait("COMPLETED", "FAILED", timeout=90) == "COMPLETED", job.log
    assert {attempt for attempt, _, _ in job.steps()} == {0, 1}
    assert_no_step_lost_or_repeated(job, 40)


def test_a_node_s_power_cut_queues_the_job_again_and_training_goes_on(training):
    job = training("-N3", "--gpus-per-node=1", STEPS="60", STEP_SECONDS="0.3")
    job.wait_for_step(3)
    job.cluster.power_off("n3")
    job.until(lambda: job.show()["Restarts"] == "1", 90, "requeue")
    assert job.wait("PENDING", "RUNNING") == "PENDING"
    done = job.steps()[-1][1]
    job.cluster.power_on("n3")
    assert job.wait("COMPLETED", "FAILED", "NODE_FAIL", timeout=180) == "COMPLETED", job.log
    # Slurm 22.05 may send the dead attempt's SIGTERM to the new one when the node is back: it stops, saves, goes on.
    assert [step for attempt, step, _ in job.steps() if attempt > 0] == list(range(done + 1, 61))
    assert {ranks for _, _, ranks in job.steps()} == {3}


def test_a_stop_request_of_a_dead_attempt_is_not_obeyed_by_the_next(training):
    first = training(*TWO, STEPS="2")
    assert first.wait(timeout=60) == "COMPLETED", first.log
    (first.train / "stop-requested").touch()
    second = training(*TWO, STEPS="6")
    assert second.wait(timeout=60) == "COMPLETED", second.log
